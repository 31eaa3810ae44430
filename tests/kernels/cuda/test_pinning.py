"""Page-locking in pieces, on a device that is not there."""

from __future__ import annotations

import gc
import mmap
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import pinning
from voltapile.kernels.cuda.pinning import Pinned


class Refused(Exception):
    pass


class Device:
    """shift: between what the host and the GPU see; refuses the piece numbered `refused`."""

    failure = Refused

    def __init__(self, shift: int = 0, refused: int = -1) -> None:
        self.shift, self.refused = shift, refused
        self.pieces: dict[int, int] = {}
        self.calls = 0

    def register(self, address: int, nbytes: int) -> int:
        self.calls += 1
        if self.calls - 1 == self.refused:
            raise Refused("out of it")
        self.pieces[address] = nbytes
        return address + self.shift * self.calls

    def unregister(self, address: int) -> None:
        del self.pieces[address]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Two pieces and a bit."""
    monkeypatch.setattr(pinning, "PIECE", 1 << 16)
    return np.frombuffer(mmap.mmap(-1, 3 << 16), np.uint8)[: (2 << 16) + 100]


def test_pieces_are_let_go_of(memory: np.ndarray) -> None:
    device, begin = Device(), memory.ctypes.data
    pinned = Pinned(device, memory)
    assert pinned.address == begin
    assert device.pieces == {
        begin: 1 << 16, begin + (1 << 16): 1 << 16, begin + (2 << 16): 100
    }  # fmt: skip
    del pinned
    gc.collect()
    assert device.pieces == {}


def test_a_refusal_is_one_line_with_the_limit(
    memory: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: Any = lambda what: (64 << 10, 64 << 10)  # noqa: E731
    monkeypatch.setattr(pinning.resource, "getrlimit", limits)
    device = Device(refused=1)
    with pytest.raises(MemoryError) as caught:
        Pinned(device, memory)
    told = str(caught.value)
    assert told.startswith("65536 bytes of host memory cannot be page-locked for the GPU (out of")
    assert "ulimit -l is 64 KiB" in told
    assert "LimitMEMLOCK=infinity" in told
    assert "\n" not in told
    del caught
    gc.collect()
    assert device.pieces == {}


def test_pieces_that_the_gpu_sees_apart(memory: np.ndarray) -> None:
    with pytest.raises(MemoryError, match="several places"):
        Pinned(Device(shift=4096), memory)
