"""What is asked of cuBLAS: its row is our column, and an error is told by its number."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from voltapile.kernels.cuda.cublas import Library, LibraryError, load_cublas


class Calls:
    """A cuBLAS that notes what it is asked."""

    def __init__(self, status: int = 0) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.status = status
        for name in ("SetStream_v2", "SetWorkspace_v2", "GemmEx"):
            vars(self)[f"cublas{name}"] = self._call(name)

    def _call(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.made.append((name, *(getattr(each, "value", each) for each in args)))
            return self.status if name == "GemmEx" else 0

        return call


def test_a_workspace_comes_after_the_stream() -> None:
    calls = Calls()
    Library(calls, 7, 8, 9, 10)  # type: ignore[arg-type]
    assert calls.made == [("SetStream_v2", 7, 8), ("SetWorkspace_v2", 7, 9, 10)]


def test_rows_are_columns_there() -> None:
    calls = Calls()
    Library(calls, 7, 8, 9, 10).product(100, 200, 300, (5, 6, 32), 0.5, True)  # type: ignore[arg-type]
    name, handle, first, second, *numbers = calls.made[-1]
    assert (name, handle, first, second) == ("GemmEx", 7, 1, 0)
    assert numbers[:3] == [6, 5, 32]
    assert numbers[4:7] == [100, 2, 32]
    assert numbers[7:10] == [200, 2, 32]
    assert numbers[11:] == [300, 0, 6, 68, -1]
    factor, adds = numbers[3]._obj.value, numbers[10]._obj.value
    assert (factor, adds) == (0.5, 1.0)


def test_an_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LibraryError, match="GemmEx gave status 14") as error:
        Library(Calls(14), 7, 8, 9, 10).product(1, 2, 3, (1, 1, 1), 1.0, False)  # type: ignore[arg-type]
    assert error.value.status == 14
    names: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: names.append(name) or SimpleNamespace())
    load_cublas(12040)
    load_cublas(13000)
    assert names == ["libcublas.so.12", "libcublas.so.13"]
