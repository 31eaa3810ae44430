"""Every byte of an upload goes to its place, through pinned memory that several threads share."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def memory(fake_cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, over a GPU whose memory is the host's."""
    fake_cupy.install(monkeypatch, fake_cupy.Gpu(copies=True))
    return importlib.import_module("voltapile.kernels.cuda.memory")


def device() -> Any:
    return importlib.import_module("voltapile.kernels.cuda.device").Device(0)


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 40_000, 123_457])
def test_an_upload_is_whole(memory: Any, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(memory, "CHUNK", 1000)
    uploader = memory.Uploader(device())
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    target = np.full(size + 16, 7, np.uint8)
    for _ in range(2):  # lanes are used again
        target[:] = 7
        uploader.send(target.ctypes.data, data)
        np.testing.assert_array_equal(target[:size], data)
        assert (target[size:] == 7).all()
    uploader.close()
    uploader.send(target.ctypes.data, data[::-1].copy())  # begins anew
    np.testing.assert_array_equal(target[:size], data[::-1])
    uploader.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("upload")]


def test_an_upload_that_fails_is_told(
    fake_cupy: Any, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CHUNK", 1000)
    uploader = memory.Uploader(device())
    data = np.zeros(5000, np.uint8)

    def refuse(*_: Any) -> None:
        raise fake_cupy.CUDARuntimeError(700)

    runtime = sys.modules["cupy.cuda"].runtime  # type: ignore[attr-defined]
    monkeypatch.setattr(runtime, "memcpyAsync", refuse)
    with pytest.raises(fake_cupy.CUDARuntimeError, match="700"):
        uploader.send(data.ctypes.data, data)
    uploader.close()


@pytest.mark.parametrize("sizes", [[10], [4000, 4000, 4000], [9000]])
def test_small_uploads_go_through_a_ring(memory: Any, sizes: list[int]) -> None:
    ring = memory.Ring(device(), 5000)
    for size in sizes:
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        target = np.zeros(size, np.uint8)
        ring.send(target.ctypes.data, data)
        np.testing.assert_array_equal(target, data)
        back = np.zeros(size, np.uint8)
        ring.fetch(target.ctypes.data, back)
        np.testing.assert_array_equal(back, data)
