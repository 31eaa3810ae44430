"""Where device memory goes: scratch of a step, weights, and the ways between host and device.

Scratch is one block of the planned size, handed out from the bottom up. Weights are sent through
pinned buffers by several threads, so that the mapped file is read once and never held.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from voltapile.kernels.cuda.device import Device, Lane, Memory, Pinned
from voltapile.kernels.cuda.launch import DeviceArray

ALIGNMENT = 256
BLOCK = 64 << 20  # weights that are smaller share a block of this size
CHUNK = 8 << 20  # of a weight, on its way through pinned memory
LANES = 4
RING = 4 << 20  # pinned bytes for small uploads


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Scratch:
    """A bump allocator. peak: the most bytes that were ever in use at once."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.planned = aligned(nbytes)
        self.used = 0
        self.peak = 0
        self._memory = device.allocate(self.planned, "scratch")

    def array(self, shape: tuple[int, ...], dtype: Any = np.float32) -> DeviceArray:
        array = DeviceArray(self._memory.ptr + self.used, shape, dtype, self._memory)
        end = self.used + aligned(array.nbytes)
        if end > self.planned:
            raise MemoryError(
                f"scratch: an array of {array.nbytes} bytes does not fit: {self.used} of the "
                f"planned {self.planned} bytes are in use"
            )
        self.used = end
        self.peak = max(self.peak, end)
        return array

    @contextmanager
    def scope(self) -> Iterator[None]:
        start = self.used
        try:
            yield
        finally:
            self.used = start

    def reset(self) -> None:
        self.used = 0


class Blocks:
    """Memory that is never given back in parts: small pieces share a block."""

    def __init__(self, device: Device, purpose: str) -> None:
        self._device, self._purpose = device, purpose
        self._block: Memory | None = None
        self._used = 0

    def take(self, nbytes: int) -> tuple[int, Memory]:
        """(address, what keeps it alive)."""
        if nbytes >= BLOCK // 4:
            own = self._device.allocate(nbytes, self._purpose)
            return own.ptr, own
        if self._block is None or self._used + nbytes > self._block.nbytes:
            self._block = self._device.allocate(BLOCK, self._purpose)
            self._used = 0
        start = self._block.ptr + self._used
        self._used += aligned(nbytes)
        return start, self._block


class Ring:
    """Small uploads in order with the kernels: values are copied to pinned memory at once."""

    def __init__(self, device: Device, nbytes: int = RING) -> None:
        self._device, self._pinned = device, Pinned(nbytes)
        self._used = 0

    def send(self, target: int, values: np.ndarray) -> None:
        """values: contiguous uint8."""
        room = self._pinned.bytes.nbytes
        for start in range(0, values.nbytes, room):
            part = values[start : start + room]
            if self._used + part.nbytes > room:
                self._device.synchronize()  # everything that lies in the ring has been read
                self._used = 0
            begin = self._used
            self._pinned.bytes[begin : begin + part.nbytes] = part
            self._device.send(target + start, self._pinned.ptr + begin, part.nbytes)
            self._used += aligned(part.nbytes)

    def fetch(self, source: int, out: np.ndarray) -> None:
        """Fill contiguous uint8 `out` from the device; waits."""
        room = self._pinned.bytes.nbytes
        for start in range(0, out.nbytes, room):
            self._device.synchronize()
            self._used = 0
            part = out[start : start + room]
            self._device.fetch(self._pinned.ptr, source + start, part.nbytes)
            self._device.synchronize()
            part[:] = self._pinned.bytes[: part.nbytes]


class Uploader:
    """Large uploads: threads copy chunks to pinned lanes while others travel."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lanes: list[Lane] = []

    def send(self, target: int, data: np.ndarray) -> None:
        """data: contiguous uint8. Later kernels see it; `data` is free when this returns."""
        if not self._lanes:
            self._lanes = [Lane(self._device, CHUNK) for _ in range(LANES)]
        starts = range(0, data.nbytes, CHUNK)
        if len(starts) == 1:
            self._lanes[0].send(target, data)
        else:
            self._send_chunks(target, data, starts)
        for lane in self._lanes:
            self._device.wait_for(lane)

    def close(self) -> None:
        """Give the pinned memory back."""
        self._device.synchronize()
        self._lanes.clear()

    def _send_chunks(self, target: int, data: np.ndarray, starts: range) -> None:
        free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for lane in self._lanes:
            free.put(lane)

        def send(start: int) -> None:
            lane = free.get()
            try:
                lane.send(target + start, data[start : start + CHUNK])
            finally:
                free.put(lane)

        with ThreadPoolExecutor(LANES) as pool:
            for _ in pool.map(send, starts):
                pass
