"""The GPUs of this computer, as the NVIDIA driver's management library tells; needs no CUDA.

An empty list where there is no driver. Costs milliseconds and creates no context, so that a process
without GPU code may ask.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import msgspec

# The last is where machines with a driver from outside put it.
_LIBRARIES = ("libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1")
_MEMORY_CLOCK = 2  # NVML_CLOCK_MEM


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. index: as the driver counts; arch: compute capability as 70, 75, 90. Bandwidths are
    bytes a second, 0: unknown; host_bandwidth: of reading its own node's memory. node: of the CPUs
    that it hangs on, -1: unknown."""

    index: int
    name: str
    arch: int
    memory_bytes: int
    free_bytes: int
    bandwidth: float = 0.0
    host_bandwidth: float = 0.0
    node: int = -1


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def probe_gpus() -> list[Gpu]:
    with _library() as nvml:
        if nvml is None:
            return []
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        found = [_probe(nvml, index) for index in range(count.value)]
        return [gpu for gpu in found if gpu is not None]


def _probe(nvml: ctypes.CDLL, index: int) -> Gpu | None:
    """None where the driver does not answer for it, e.g. because it has fallen off the bus."""
    handle, memory = ctypes.c_void_p(), _Memory()
    major, minor = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(96)
    answers = (
        nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)),
        nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name))),
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)),
        nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)),
    )
    if any(answers):
        return None
    return Gpu(
        index=index,
        name=name.value.decode(errors="replace"),
        arch=10 * major.value + minor.value,
        memory_bytes=memory.total,
        free_bytes=memory.free,
        bandwidth=_bandwidth(nvml, handle),
    )


def _bandwidth(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> float:
    """Memory moves bits at both edges of its clock."""
    mhz, bits = ctypes.c_uint(), ctypes.c_uint()
    try:
        answers = (
            nvml.nvmlDeviceGetMaxClockInfo(handle, _MEMORY_CLOCK, ctypes.byref(mhz)),
            nvml.nvmlDeviceGetMemoryBusWidth(handle, ctypes.byref(bits)),
        )
    except AttributeError:  # a driver that is older than the question
        return 0.0
    return 0.0 if any(answers) else 2e6 * mhz.value * bits.value / 8


@contextlib.contextmanager
def _library() -> Iterator[ctypes.CDLL | None]:
    """NVML, ready; None where there is no driver."""
    for path in _LIBRARIES:
        try:
            nvml = ctypes.CDLL(path)
        except OSError:
            continue
        if nvml.nvmlInit_v2() != 0:
            break
        try:
            yield nvml
        finally:
            nvml.nvmlShutdown()
        return
    yield None
