"""Where device memory goes: scratch of a step, weights, and the ways between host and device.

Scratch is one block of the planned size, handed out from the bottom up. Weights are sent through
pinned buffers by several threads, so that the mapped file is read once and never held.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from voltapile.kernels.cuda.device import Device, Lane, Mark, Memory, Pinned
from voltapile.kernels.cuda.launch import DeviceArray
from voltapile.kernels.cuda.tiles import LARGEST
from voltapile.kernels.ops import MAX_FETCHES

ALIGNMENT = 256
BLOCK = 64 << 20  # weights that are smaller share a block of this size
CHUNK = LARGEST  # bytes of a weight, on their way through pinned memory
LANES = 8
RING = 4 << 20  # pinned bytes for small uploads
PARCEL = 1 << 20  # pinned bytes of one fetch
TOLD = 16 << 10  # bytes of an array that a kernel copies there, at most (csrc/tell.cu)
CONSTANTS = 1 << 20  # bytes of small arrays that launchers ask for again and again

Tell = Callable[[int, DeviceArray], None]


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Constants:
    """Small arrays that stay, each of them once."""

    def __init__(self, device: Device) -> None:
        self._known: dict[tuple[bytes, str, tuple[int, ...]], DeviceArray] = {}
        self._memory = device.allocate(CONSTANTS, "constants")
        self._used = 0
        self._lane = Lane(device, CONSTANTS)

    def array(self, values: np.ndarray) -> DeviceArray:
        values = np.ascontiguousarray(values)
        key = values.tobytes(), values.dtype.str, values.shape
        if key not in self._known:
            start = self._used
            assert start + values.nbytes <= CONSTANTS, "too many constants"
            self._used += aligned(values.nbytes)
            self._lane.send(self._memory.ptr + start, values.reshape(-1).view(np.uint8))
            self._lane.event.synchronize()  # not by the stream: it may be captured
            found = DeviceArray(self._memory.ptr + start, values.shape, values.dtype, self._memory)
            self._known[key] = found
        return self._known[key]


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


class Parcel:
    """One use of a pinned buffer, with an event behind the copies to it; see ops.Arrival."""

    def __init__(self, device: Device, pinned: Pinned, mark: Mark) -> None:
        self._device, self.pinned, self._mark = device, pinned, mark
        self._parts: list[DeviceArray] = []
        self.is_open = False

    def send(self, arrays: Sequence[DeviceArray], tell: Tell) -> None:
        self._parts, self.is_open = list(arrays), True
        offset = 0
        for array in arrays:
            assert offset + array.nbytes <= PARCEL, "too much to fetch at once"
            target = self.pinned.ptr + offset
            if 0 < array.nbytes <= TOLD and array.nbytes % 4 == 0:
                tell(target, array)
            else:
                self._device.fetch(target, array.ptr, array.nbytes)
            offset += aligned(array.nbytes)
        self._mark.record()

    def is_there(self) -> bool:
        return self._mark.is_reached()

    def take(self) -> list[np.ndarray]:
        self._mark.wait()
        found, offset = [], 0
        for array in self._parts:
            raw = self.pinned.bytes[offset : offset + array.nbytes]
            found.append(raw.copy().view(array.dtype).reshape(array.shape))
            offset += aligned(array.nbytes)
        self.is_open = False
        return found


class Courier:
    """Small copies to the host that are waited for later, in the order of their beginning."""

    def __init__(self, device: Device) -> None:
        self._parcels = [Parcel(device, Pinned(PARCEL), Mark(device)) for _ in range(MAX_FETCHES)]
        self._next = 0

    def fetch(self, arrays: Sequence[DeviceArray], tell: Tell) -> Parcel:
        """tell: copies an array to page-locked memory, by a kernel."""
        parcel = self._parcels[self._next]
        assert not parcel.is_open, "too many fetches are under way"
        self._next = (self._next + 1) % MAX_FETCHES
        parcel.send(arrays, tell)
        return parcel


class Uploader:
    """Large uploads: threads copy chunks to pinned lanes while others travel."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lanes: list[Lane] = []
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    def send(self, target: int, data: np.ndarray) -> None:
        """data: uint8, contiguous in its last axis, and travels in whole entries of its first one.
        Later kernels see it; `data` is free when this returns."""
        if self._threads is None:
            self._lanes = [Lane(self._device, CHUNK) for _ in range(LANES)]
            for lane in self._lanes:
                self._free.put(lane)
            self._threads = ThreadPoolExecutor(LANES, "upload")

        each = data[:1].nbytes
        assert each <= CHUNK, f"{each} bytes cannot travel in one piece"
        count = CHUNK // max(1, each)
        # A run of bytes is copied as one value: a fifth faster than as bytes.
        values = data if data.ndim == 1 else data.view(f"V{data.shape[-1]}")

        def send(start: int) -> Lane:
            lane = self._free.get()
            try:
                lane.send(target + start * each, values[start : start + count])
            finally:
                self._free.put(lane)
            return lane

        starts = range(0, len(data), count)
        used = self._threads.map(send, starts) if len(starts) > 1 else map(send, starts)
        for lane in set(used):
            self._device.wait_for(lane)

    def close(self) -> None:
        """Give threads and pinned memory back."""
        self._device.synchronize()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        self._lanes.clear()
        self._free = queue.SimpleQueue()
