"""A part of the large golden set skips what needs more of it, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from voltapile.shm.gguf import Gguf, GgufError

from . import conftest


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files, one of which is here."""
    folder = tmp_path / "golden"
    (folder / "a").mkdir(parents=True)
    (folder / "a/model-f16.gguf").write_bytes(b"GGUF")
    (folder / "SHA256SUMS").write_text("00  a/model-f16.gguf\n11  a/golden.npz\n")
    monkeypatch.setattr(conftest, "GOLDEN", folder)
    return folder


def called(error: Exception) -> None:
    """As pytest has a test that ends so."""
    hook = conftest.pytest_pyfunc_call()
    next(hook)
    hook.throw(error)


def error_of(path: Path) -> Exception:
    try:
        Gguf.open(path).close() if path.suffix == ".gguf" else np.load(path).close()
    except (OSError, GgufError) as error:
        return error
    raise AssertionError(f"{path} was opened")


@pytest.mark.parametrize("name", ["a/golden.npz", "a/model-Q8_0.gguf", "b/model-f16.gguf"])
def test_what_is_not_here_is_skipped(golden: Path, name: str) -> None:
    with pytest.raises(pytest.skip.Exception, match=f"{name} is not here"):
        called(error_of(golden / name))


def test_without_sums_a_set_is_not_whole(golden: Path) -> None:
    (golden / "SHA256SUMS").unlink()
    with pytest.raises(pytest.skip.Exception):
        called(error_of(golden / "a/golden.npz"))


def test_a_whole_set_hides_no_mistake(golden: Path) -> None:
    (golden / "a/golden.npz").write_bytes(b"")
    error = error_of(golden / "a/model-Q8_0.gguf")
    with pytest.raises(GgufError):
        called(error)


def test_other_failures_stay(golden: Path, tmp_path: Path) -> None:
    for error in (
        AssertionError("1 != 2"),
        error_of(tmp_path / "elsewhere.npz"),
        GgufError(f"{golden}/a/model-f16.gguf: byte 4: the file ends"),  # it is here
    ):
        with pytest.raises(type(error)):
            called(error)
