"""Every byte of an upload goes to its place, through pinned memory that several threads share."""

from __future__ import annotations

import ctypes
import importlib
import sys
import threading
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import tiles

from ..test_matmul import random_raw


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


@pytest.mark.parametrize("name", tiles.FORMATS)
def test_tiles_are_made_on_the_way(
    fake_cupy: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Experts, of which several tiles travel at once; rows of a matrix; what is no whole tiles."""

    class Gpu(fake_cupy.Gpu):  # type: ignore[misc, name-defined]
        def malloc(self, nbytes: int) -> int:
            kept.append(np.zeros(nbytes, np.uint8))
            return int(kept[-1].ctypes.data)

        def give_back(self, ptr: int) -> None:
            pass

    kept: list[np.ndarray] = []
    fake_cupy.install(monkeypatch, Gpu(copies=True))
    ops = importlib.import_module("voltapile.kernels.cuda.ops").CudaOps(0, 1 << 20)
    raw = random_raw(name, 96, 768).reshape(-1)
    monkeypatch.setattr(
        importlib.import_module("voltapile.kernels.cuda.memory"), "CHUNK", raw.nbytes * 2 // 5
    )
    weight = ops.weight(raw, name, (2, 48, 768))
    expected = np.ascontiguousarray(tiles.in_tiles(raw, name, 768)).reshape(-1)
    assert weight.is_tiled
    assert bytes(expected) == ctypes.string_at(weight.ptr, weight.nbytes)
    plain = ops.weight(raw, name, (8, 12, 768))
    assert not plain.is_tiled
    assert bytes(raw) == ctypes.string_at(plain.ptr, plain.nbytes)
    matrix = ops.weight(raw, name, (96, 768))
    part = ops.weight_rows(matrix, 32, 80)
    assert part.is_tiled
    assert part.ptr == matrix.ptr + 32 * matrix.row_bytes
    with pytest.raises(AssertionError):
        ops.weight_rows(matrix, 32, 81)
    ops.prepare(lambda: None)  # lets threads go


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
