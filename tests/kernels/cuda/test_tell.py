"""What the host is told of a step: the kernel on the CPU, and what is left to the copy engine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import sampling
from voltapile.kernels.cuda.launch import DeviceArray

from .emulation import has_compiler
from .test_fragments import ops_of


@pytest.mark.skipif(not has_compiler(), reason="no g++")
@pytest.mark.parametrize("shape", [(2, 1), (2, 64), (3, 257)])
def test_all_words_are_told(folder: Path, shape: tuple[int, ...]) -> None:
    ops = ops_of(90, folder)
    values = np.random.default_rng(1).integers(-9, 9, shape).astype(np.int32)
    target = np.full(values.size + 8, 7, np.int32)
    sampling.tell(ops, target.ctypes.data, ops.array(values))
    np.testing.assert_array_equal(target[: values.size], values.reshape(-1))
    assert (target[values.size :] == 7).all()


def test_large_arrays_are_copied(fake_cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch, fake_cupy.Gpu(copies=True))
    memory = importlib.import_module("voltapile.kernels.cuda.memory")
    device = importlib.import_module("voltapile.kernels.cuda.device").Device(0)
    courier, told = memory.Courier(device), []
    values = [np.arange(n, dtype=np.int32) for n in (2, 0, 4096, 4097)]
    arrays = [DeviceArray(each.ctypes.data, each.shape, each.dtype) for each in values]
    small = np.arange(3, dtype=np.uint8)  # no words
    arrays.append(DeviceArray(small.ctypes.data, small.shape, small.dtype))

    def tell(target: int, array: DeviceArray) -> None:
        told.append(array.size)
        device.fetch(target, array.ptr, array.nbytes)

    for _ in range(3):
        found = courier.fetch(arrays, tell).take()
        for ours, theirs in zip(found, [*values, small], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert told == 3 * [2, 4096]
