"""bench/device.sh: what its sanitizer stage names is there, since a device run is dear."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from voltapile.kernels.cuda import nvrtc
from voltapile.kernels.cuda.compile import compile_instance
from voltapile.kernels.cuda.launch import Instance
from voltapile.kernels.cuda.table import INSTANCES

SCRIPT = Path(__file__).parents[2] / "bench/device.sh"
CHECKS = re.compile(r"^checks_(\w+)=\((.*?)^  \"([^\n]*)\"\)$", re.DOTALL | re.MULTILINE)


def named() -> dict[str, list[str]]:
    """Tests by kind of kernel."""
    text = SCRIPT.read_text()
    return {
        found[1]: re.findall(r'^  "(test_[^"]*)"', found[0], re.MULTILINE)
        for found in CHECKS.finditer(text)
    }


def test_it_is_a_script() -> None:
    assert subprocess.run(["bash", "-n", SCRIPT], timeout=60).returncode == 0


def test_what_the_sanitizer_sees_is_there() -> None:
    """A name that is wrong would leave a kind of kernel out, and be seen on the device alone."""
    kinds = re.search(r"^checks=\((.*)\)$", SCRIPT.read_text(), re.MULTILINE)
    assert kinds is not None
    assert set(kinds[1].split()) == named().keys()
    files = {name.split("::")[0] for names in named().values() for name in names}
    folder = SCRIPT.parents[1] / "tests/gpu"
    asked = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*asked, "-o", "addopts=--import-mode=importlib", *(str(folder / each) for each in files)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    there = {line.partition("tests/gpu/")[2] for line in done.stdout.splitlines()}
    for kind, names in named().items():
        assert names, kind
        assert set(names) <= there, kind


def test_a_kind_that_is_not_there_runs_nothing(tmp_path: Path) -> None:
    """Pytest without a name would spend the device's minutes on all tests there are."""
    functions = SCRIPT.read_text().partition("\nrun setup\n")[0].partition("\nsummary=()\n")[2]
    begun = f"out={tmp_path}; sanitizer={tmp_path}; python=python3; summary=()"
    stage = 'stage() { summary+=("ran $2 with ${@: -1}"); }'
    asked = 'run sanitize; printf "%s\\n" "${summary[@]}"'
    done = subprocess.run(
        ["bash", "-uc", f"{begun}; {functions}\n{stage}\n{asked}"],
        capture_output=True, text=True, timeout=60,
        env={**os.environ, "TOOLS": "memcheck", "KINDS": "deltas matmul experts-x"},
    )  # fmt: skip
    ran, *refused, _ = done.stdout.splitlines()
    assert ran == f"ran memcheck-deltas with tests/gpu/{named()['deltas'][-1]}"
    kinds = " ".join(named())
    assert refused == [
        f"memcheck-{kind}: there is no such kind, but {kinds}" for kind in ("matmul", "experts-x")
    ]
    assert done.stderr == ""


@pytest.mark.slow
def test_kernels_with_bells_are_those_that_racecheck_leaves_out(tmp_path: Path) -> None:
    try:
        nvrtc.version()
    except nvrtc.NvrtcMissingError as error:
        pytest.skip(str(error))
    pattern = re.search(r'^bells="(.*)"$', SCRIPT.read_text(), re.MULTILINE)
    assert pattern is not None
    one_of: dict[str, Instance] = {}
    for instance in INSTANCES:
        one_of.setdefault(instance.function, instance)
    for name, instance in one_of.items():
        text = compile_instance(instance, "compute_90", tmp_path).decode()
        (own,) = (each for each in text.split(".entry ") if re.match(rf"{name}\b", each))
        assert bool(re.search(pattern[1], name)) == ("mbarrier" in own), name
