"""The rules that keep the project small: who may import whom, and how large things may grow.

Reads source files only; exceptions are lists here, each with a reason.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("shm", "kernels", "topology", "workers", "gateway")
ALLOWED = {
    "shm": set(),
    "kernels": {"shm"},
    "topology": {"shm"},
    "workers": {"shm", "kernels", "topology"},
    "gateway": {"shm", "topology", "workers.protocol"},
}
THIRD_PARTY = {"cupy": "kernels/cuda/", "aiohttp": "gateway/"}  # only there
MAX_FILE, MAX_FUNCTION, USUAL_FUNCTION = 400, 60, 40
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
FORBIDDEN_NAMES = {"utils", "common", "helpers", "base"}
FORBIDDEN_MODULES = {"pickle", "dill", "shelve", "marshal"}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


SOURCES = sources(*PACKAGES)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the package"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violation(path: Path, imported: str) -> str:
    """Why `path` may not import `imported`; "" if it may."""
    package = path.relative_to(ROOT).parts[0]
    top = imported.split(".")[0]
    home = THIRD_PARTY.get(top)
    if home and not name_of(path).startswith(home):
        return f"{top} only under {home}"
    if top != "voltapile" or name_of(path).startswith("gateway/cli/"):
        return ""
    inner = imported.removeprefix("voltapile.")
    permitted = ALLOWED[package] | {package}
    if any(inner == name or inner.startswith(name + ".") for name in permitted):
        return ""
    return f"{package} may import {sorted(permitted)}"


def test_imports_follow_the_layers() -> None:
    found = [
        f"{name_of(path)}: {imported}: {why}"
        for path in SOURCES
        for imported in imports(ast.parse(path.read_text()))
        if (why := violation(path, imported))
    ]
    assert not found, "\n".join(found)


def test_the_import_rule_can_fail() -> None:
    assert violation(ROOT / "gateway/engine.py", "voltapile.workers.engine.Engine")
    assert violation(ROOT / "topology/plan.py", "voltapile.kernels.load.load")
    assert violation(ROOT / "workers/engine.py", "aiohttp.web")
    assert not violation(ROOT / "gateway/engine.py", "voltapile.workers.protocol.Step")


def test_names_and_inits() -> None:
    for path in SOURCES:
        assert path.stem not in FORBIDDEN_NAMES, name_of(path)
        if path.name == "__init__.py":
            assert path.read_text() == "", f"{name_of(path)} must be empty"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_sizes() -> None:
    lengths: list[int] = []
    problems: list[str] = []
    for path in SOURCES:
        text = path.read_text()
        lines = text.count("\n")
        if lines > MAX_FILE and name_of(path) not in LONG_FILES:
            problems.append(f"{name_of(path)}: {lines} lines")
        for function in functions(ast.parse(text)):
            lengths.append(length(function))
            key = f"{name_of(path)}:{function.name}"
            if lengths[-1] > MAX_FUNCTION and key not in LONG_FUNCTIONS:
                problems.append(f"{key}: {lengths[-1]} lines")
    assert not problems, "\n".join(problems)
    usual = sum(size <= USUAL_FUNCTION for size in lengths)
    assert usual >= 0.95 * len(lengths), f"only {usual} of {len(lengths)} functions are short"


def test_lines_of_kernels_are_as_narrow_as_others() -> None:
    """ruff sees Python's alone."""
    kinds = (".cu", ".cuh", ".h", ".cpp")
    problems = [
        f"{name_of(path)}:{number}: {len(line)} columns"
        for folder in ("kernels", "tests")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in kinds
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 100
    ]
    assert not problems, "\n".join(problems)


def test_every_module_says_what_it_is() -> None:
    for path in SOURCES:
        if path.name != "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_text())), f"{name_of(path)}: no docstring"


def test_forbidden_constructs() -> None:
    problems = []
    for path in SOURCES:
        may_print = name_of(path).startswith("gateway/cli/") or path.name == "__main__.py"
        reads = name_of(path) == "gateway/cli/environment.py"  # what CUDA reads, too
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{name_of(path)}:{getattr(node, 'lineno', 0)}"
            match node:
                case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "getenv") if not reads:
                    problems.append(f"{where}: the Plan is the only configuration")
                case ast.Call(func=ast.Name(id="print")) if not may_print:
                    problems.append(f"{where}: print")
                case ast.ExceptHandler(type=None):
                    problems.append(f"{where}: bare except")
                case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="self"), *_]):
                    problems.append(f"{where}: dispatch by name")
                case ast.Import(names=names) if FORBIDDEN_MODULES & {n.name for n in names}:
                    problems.append(f"{where}: serialises code")
    assert not problems, "\n".join(problems)


def test_no_machine_paths_or_registry_hosts() -> None:
    """What is committed must not depend on where it was written."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\0")
    if listed == [""]:
        pytest.skip("not a git checkout")
    hosts = ("pypi" + ".org", "pythonhosted" + ".org", "npmjs" + ".", "debian" + ".org")
    for name in filter(None, listed):
        path = ROOT / name
        if path.suffix in (".gguf", ".npz") or not path.is_file():
            continue
        text = path.read_text(errors="replace")
        for needle in ("/work" + "/", *hosts):
            assert needle not in text, f"{name} names {needle}"


# A process that has third parties' modules only forks for each of ours: what is imported by one
# is not there for another, and numpy need not be loaded 250 times.
IMPORTER = """
import importlib, json, os, sys, traceback, warnings
third_party, ours = json.load(sys.stdin)
for name in third_party:
    importlib.import_module(name)
found = {}
for name in ours:
    read, write = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # of threads, from Python 3.12 on
        child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
            said = ""
        except BaseException:
            said = traceback.format_exc()
        with open(write, "w") as pipe:
            pipe.write(said)
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        found[name] = pipe.read()
    status = os.waitpid(child, 0)[1]
    found[name] += f"status {status}" if status else ""
print(json.dumps(found))
"""
MODULES = {
    "voltapile." + ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in SOURCES
    if path.stem not in ("__init__", "__main__")
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What an interpreter says that imports a module of ours and no other, warnings as errors."""
    named = {
        name
        for path in SOURCES
        for node in ast.parse(path.read_text()).body  # an extra is imported in a function
        for name in modules_named(node)
    }
    ours = {"voltapile", *PACKAGES, *sys.stdlib_module_names, "cupy", "cupy_backends"}
    third_party = sorted(name for name in named if name.split(".")[0] not in ours)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORTER],
        input=json.dumps([third_party, list(MODULES)]),
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def modules_named(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_alone(said: dict[str, str], module: str) -> None:
    """No import cycle, no warning, and nothing that another module must import first."""
    if "No module named 'cupy'" in said[module]:
        pytest.skip("cupy is not installed")
    assert not said[module], said[module]
