"""One GPU through cupy, and the only file that imports it: memory, copies, modules, capture.

Memory comes from plain cudaMalloc, never from a pool. Knows addresses and bytes; what they mean is
told elsewhere. Errors of the driver come out as they are, but for memory that is not there.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from cupy_backends.cuda.api import driver
from cupy_backends.cuda.libs import cublas
from voltapile.kernels.cuda import submit
from voltapile.kernels.cuda.cublas import WORKSPACE, Library, LibraryError, load_cublas
from voltapile.kernels.cuda.trail import Trail

# cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY, CUBLAS_STATUS_ALLOC_FAILED
NO_MEMORY = {
    runtime.CUDARuntimeError: 2,
    driver.CUDADriverError: 2,
    cublas.CUBLASError: 3,
    LibraryError: 3,
}
DeviceError = runtime.CUDARuntimeError
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: over NVLink, not over PCIe
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3  # cudaMemcpyKind
HOST_PORTABLE, HOST_MAPPED = 1, 2  # cudaHostRegister's flags
CLOCK_RATE = 13  # cudaDevAttrClockRate, in kHz
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
ALL_REGISTERS = 65536  # of a multiprocessor
REGISTERS = 4  # CU_FUNC_ATTRIBUTE_NUM_REGS, of a thread
CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
SHARED_WITHOUT_ASKING = 48 << 10

_locked: Counter[int] = Counter()  # how many of this process have asked for host memory, by address
_locking = threading.RLock()  # a finalizer may come while it is held


@contextmanager
def room_for(purpose: str, taken: Mapping[str, int] | None = None) -> Iterator[None]:
    """Memory that is not there, whoever wanted it, becomes a MemoryError that names `purpose` and
    the numbers. taken: bytes of this process by purpose."""
    try:
        yield
    except tuple(NO_MEMORY) as error:
        if error.status != NO_MEMORY[type(error)]:
            raise
        try:
            free, total = runtime.memGetInfo()
            text = f"{free} of {total} bytes are free"
        except runtime.CUDARuntimeError:
            text = "it is full"
        mine = "".join(f", {name} has {nbytes}" for name, nbytes in (taken or {}).items())
        raise MemoryError(f"the GPU has no room for {purpose}: {text}{mine}") from None


class Memory:
    """Device memory, given back when nobody holds it any longer."""

    def __init__(self, ptr: int, nbytes: int) -> None:
        self.ptr, self.nbytes = ptr, nbytes
        weakref.finalize(self, runtime.free, ptr)


class Pinned:
    """Page-locked host memory. bytes: a uint8 array of it."""

    def __init__(self, nbytes: int) -> None:
        with room_for(f"{nbytes} bytes of page-locked host memory"):
            self.ptr = int(runtime.hostAlloc(nbytes, 0))
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.ptr))
        weakref.finalize(self, runtime.freeHost, self.ptr)


class Function:
    """A kernel that is loaded; see launch.Kernel. is_early: it starts while others still run."""

    def __init__(self, device: Device, module: Any, name: str, is_early: bool) -> None:
        self.name = name
        self._device, self._function = device, module.get_function(name)
        if is_early:  # a multiprocessor that must divide its memory anew empties first
            driver.funcSetAttribute(self._function.ptr, CARVEOUT, 100)
        self._early = submit.Submission(self._function.ptr) if is_early else None
        self._shared = SHARED_WITHOUT_ASKING
        self._registers = driver.funcGetAttribute(REGISTERS, self._function.ptr)

    def __call__(
        self, grid: tuple[int, ...], block: int, args: tuple[Any, ...], shared: int = 0
    ) -> None:
        if shared > self._shared:
            driver.funcSetAttribute(self._function.ptr, MAX_DYNAMIC_SHARED, shared)
            self._shared = shared
        self._device.trail.add(self._held(math.prod(grid), self._registers * block))
        follows_call, self._device.follows_call = self._device.follows_call, False
        if self._early is not None and not follows_call:
            self._early.launch(grid, block, args, shared, self._device.stream.ptr)
            return
        self._function(grid, (block,), args, shared_mem=shared, stream=self._device.stream)

    def _held(self, blocks: int, registers: int) -> int:
        """See trail.Trail. registers: of a block."""
        if 4 * blocks < 3 * self._device.multiprocessors:
            return 0
        together = min(-(-blocks // self._device.multiprocessors), ALL_REGISTERS // registers)
        return registers * max(1, together)


class Lane:
    """A stream of its own with a pinned buffer, for copies beside the computation."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.buffer = Pinned(nbytes)
        self._number = device.number
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self.event = cupy.cuda.Event(block=False, disable_timing=True)
        self.event.record(self._stream)

    def send(self, target: int, source: np.ndarray) -> None:
        """Copy host bytes, of any layout, to the device; returns when `source` is free again."""
        runtime.setDevice(self._number)  # of this thread
        self.event.synchronize()
        into = self.buffer.bytes[: source.nbytes].view(source.dtype)
        np.copyto(into.reshape(source.shape), source)
        stream = self._stream.ptr
        runtime.memcpyAsync(target, self.buffer.ptr, source.nbytes, TO_DEVICE, stream)
        self.event.record(self._stream)


class Mark:
    """A place in the order of what is submitted; `record` sets it, again and again."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._event = cupy.cuda.Event(block=True, disable_timing=True)

    def record(self) -> None:
        self._event.record(self._device.stream)

    def is_reached(self) -> bool:
        """Raises what went wrong on the device, if anything has."""
        return bool(self._event.done)

    def wait(self) -> None:
        self._event.synchronize()


class Device:
    """A GPU and the one stream on which everything is computed, in order."""

    failure = DeviceError

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.taken: Counter[str] = (
            Counter()
        )  # bytes by purpose, whether they were given back or not
        with room_for("a context"):
            runtime.setDevice(number)
            runtime.free(0)  # makes it
        facts = runtime.getDeviceProperties(number)
        self.name: str = facts["name"].decode()
        self.arch: int = facts["major"] * 10 + facts["minor"]
        self.multiprocessors: int = facts["multiProcessorCount"]
        self.total_bytes: int = facts["totalGlobalMem"]
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.follows_call = False  # what comes next has no kernel before it to start beside
        self.trail = Trail()
        self._modules: list[Any] = []
        self._library: Library | None = None

    # --- memory -------------------------------------------------------------------------------
    def allocate(self, nbytes: int, purpose: str) -> Memory:
        """Raises MemoryError that names `purpose` and the numbers."""
        runtime.setDevice(self.number)
        with room_for(f"{nbytes} bytes for {purpose}", self.taken):
            memory = Memory(int(runtime.malloc(max(1, nbytes))), nbytes)
        self.taken[purpose] += nbytes
        return memory

    def free_bytes(self) -> int:
        return int(runtime.memGetInfo()[0])

    def clear(self, ptr: int, nbytes: int) -> None:
        if nbytes:
            runtime.memsetAsync(ptr, 0, nbytes, self.stream.ptr)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Within the device, in order with the kernels."""
        if nbytes:
            runtime.memcpyAsync(target, source, nbytes, ON_DEVICE, self.stream.ptr)

    def send(self, target: int, pinned: int, nbytes: int) -> None:
        """From pinned memory, in order with the kernels; `pinned` must stay as it is meanwhile."""
        if nbytes:
            runtime.memcpyAsync(target, pinned, nbytes, TO_DEVICE, self.stream.ptr)

    def fetch(self, pinned: int, source: int, nbytes: int) -> None:
        """To pinned memory; it is there after synchronize()."""
        if nbytes:
            runtime.memcpyAsync(pinned, source, nbytes, TO_HOST, self.stream.ptr)

    def call(self, function: int, argument: int) -> None:
        """C code on the host, in order with the kernels; see submit.call."""
        submit.call(function, argument, self.stream.ptr)
        self.follows_call = True

    def wait_for(self, lane: Lane) -> None:
        """Kernels submitted from now on come after what the lane has sent."""
        self.stream.wait_event(lane.event)

    def synchronize(self) -> None:
        self.stream.synchronize()

    def open_library(self) -> Library:
        """cuBLAS, which takes memory of its own when it begins."""
        if self._library is None:
            self._workspace = self.allocate(WORKSPACE, "workspace")
            with room_for("cuBLAS", self.taken):
                handle, found = cublas.create(), load_cublas(runtime.runtimeGetVersion())
                places = self.stream.ptr, self._workspace.ptr
                self._library = Library(found, handle, *places, WORKSPACE)
        return self._library

    def product(
        self, weight: int, x: int, out: int, shape: tuple[int, int, int], factor: float, adds: bool
    ) -> None:
        """See Library."""
        self.trail.add(0)
        with room_for("cuBLAS", self.taken):
            self.open_library().product(weight, x, out, shape, factor, adds)

    @property
    def ticks_per_second(self) -> float:
        """Of a multiprocessor's clock at its fastest; at another pace, times are longer."""
        return 1000.0 * int(runtime.deviceGetAttribute(CLOCK_RATE, self.number))

    # --- other processes ----------------------------------------------------------------------
    def handle_of(self, memory: Memory) -> bytes:
        """64 bytes by which another process on this machine opens whole `memory`."""
        return bytes(runtime.ipcGetMemHandle(memory.ptr))

    def open_handle(self, handle: bytes) -> int:
        """Where another process's memory lies for this GPU's kernels. Raises DeviceError."""
        runtime.setDevice(self.number)
        return int(runtime.ipcOpenMemHandle(handle, LAZY_PEER_ACCESS))

    def is_linked(self, other: int) -> bool:
        """Whether the link to GPU `other` is more than PCIe."""
        if other == self.number:
            return True
        value, devices = ctypes.c_int(), []
        library = ctypes.CDLL("libcuda.so.1")
        for number in (self.number, other):
            device = ctypes.c_int()
            if library.cuDeviceGet(ctypes.byref(device), number):
                return False
            devices.append(device)
        failed = library.cuDeviceGetP2PAttribute(ctypes.byref(value), NATIVE_ATOMICS, *devices)
        return not failed and bool(value.value)

    def register(self, address: int, nbytes: int) -> int:
        """Page-lock host memory for this process; where the GPU sees it. Raises DeviceError. It
        stays mapped until `unregister`: else the GPU would find there what was before, whatever
        is mapped next. Ranks of one process may ask for the same."""
        runtime.setDevice(self.number)
        with _locking:
            if not _locked[address]:
                runtime.hostRegister(address, nbytes, HOST_PORTABLE | HOST_MAPPED)
            _locked[address] += 1
        return int(runtime.pointerGetAttributes(address).devicePointer) or address

    def unregister(self, address: int) -> None:
        with _locking:
            _locked[address] -= 1
            if not _locked[address]:
                runtime.hostUnregister(address)

    # --- code ---------------------------------------------------------------------------------
    def function(self, code: bytes, name: str, is_early: bool = False) -> Function:
        """A kernel of a cubin, or of PTX, which the driver then compiles. is_early: it waits for
        the kernel before it, itself (csrc/grid.cuh)."""
        runtime.setDevice(self.number)
        module = cupy.cuda.function.Module()
        with room_for(f"the kernel {name}", self.taken):
            module.load(code)
        self._modules.append(module)
        return Function(self, module, name, is_early)

    @contextmanager
    def capture(self) -> Iterator[list[Any]]:
        """What is submitted inside is recorded; the list then holds one graph (`replay`)."""
        recorded: list[Any] = []
        self.stream.begin_capture(runtime.streamCaptureModeRelaxed)
        try:
            yield recorded
        finally:
            with room_for("a recorded step", self.taken):
                graph = self.stream.end_capture()
                graph.upload(self.stream)  # or its memory would be taken by the first replay
                recorded.append(graph)

    def replay(self, graph: Any) -> None:
        graph.launch(self.stream)

    # --- time ---------------------------------------------------------------------------------
    def event(self) -> Any:
        """Recorded now on the stream; for `seconds_between`."""
        event = cupy.cuda.Event()
        event.record(self.stream)
        return event

    def seconds_between(self, first: Any, last: Any) -> float:
        last.synchronize()
        return float(cupy.cuda.get_elapsed_time(first, last)) / 1000


def device_count() -> int:
    """GPUs that this process may use; 0 where there is no driver."""
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0


def addresses() -> list[str]:
    """Of each of them on the bus, in CUDA's order, as /sys writes it: 0000:04:00.0."""
    found = [runtime.deviceGetPCIBusId(number) for number in range(device_count())]
    return [address.lower()[-12:] for address in found]
