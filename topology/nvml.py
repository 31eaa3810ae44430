"""The NVIDIA driver's management library in Python values; needs no CUDA and makes no context.

A question that the driver does not know, or does not answer for this card, has the answer None.
Knows nothing of what answers are for.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# The last is where machines with a driver from outside put it.
LIBRARIES = ("libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1")
CORE_CLOCK, MEMORY_CLOCK = 1, 2  # NVML_CLOCK_SM, NVML_CLOCK_MEM
READS, WRITES = 0, 1  # NVML_P2P_CAPS_INDEX_READ, _WRITE
PEER_IS_GPU, PEER_IS_CPU, PEER_IS_SWITCH = 0, 1, 2  # NVML_NVLINK_DEVICE_TYPE_*
MOST_LINKS = 18
MOST_PROCESSES = 64
UNKNOWN_SIZE = 2**64 - 1
# Bytes a second and direction of one NVLink, by its version.
LINK_SPEED = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Pci(ctypes.Structure):
    _fields_ = (
        ("old_bus", ctypes.c_char * 16),
        ("numbers", ctypes.c_uint * 5),
        ("bus", ctypes.c_char * 32),
    )


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instances", ctypes.c_uint * 2),
    )


@dataclass(frozen=True)
class NvLink:
    """One link that is up. speed: bytes a second in each direction; bus: of the other end."""

    kind: int
    bus: str
    speed: float


class Nvml:
    """The library after its start; see `opened`."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def cards(self) -> list[Card]:
        """Those that answer: one that has fallen off the bus does not."""
        count, found = self.number("nvmlDeviceGetCount_v2") or 0, []
        for index in range(count):
            handle = ctypes.c_void_p()
            call = ctypes.c_uint(index), ctypes.byref(handle)
            if self.ask("nvmlDeviceGetHandleByIndex_v2", *call):
                found.append(Card(self, index, handle))
        return found

    @property
    def driver(self) -> str:
        text = ctypes.create_string_buffer(96)
        is_told = self.ask("nvmlSystemGetDriverVersion", text, ctypes.c_uint(len(text)))
        return text.value.decode(errors="replace") if is_told else ""

    @property
    def cuda(self) -> tuple[int, int]:
        """The newest CUDA that the driver knows; (0, 0): not told."""
        value = ctypes.c_int()
        if not self.ask("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(value)):
            return 0, 0
        return value.value // 1000, value.value % 1000 // 10

    def ask(self, name: str, *args: Any) -> bool:
        """Whether the driver knows the question and has answered it."""
        function = getattr(self._library, name, None)
        return function is not None and function(*args) == 0

    def number(self, name: str, *args: Any) -> int | None:
        value = ctypes.c_uint()
        return value.value if self.ask(name, *args, ctypes.byref(value)) else None


class Card:
    """One GPU. index: as the library counts, or as it was told to be counted."""

    def __init__(self, nvml: Nvml, index: int, handle: ctypes.c_void_p) -> None:
        self._nvml, self.index, self._handle = nvml, index, handle

    def counted_as(self, index: int) -> Card:
        return Card(self._nvml, index, self._handle)

    def number(self, what: str, *args: Any) -> int | None:
        """The answer to nvmlDeviceGet + what."""
        return self._nvml.number(f"nvmlDeviceGet{what}", self._handle, *args)

    @property
    def name(self) -> str | None:
        text = ctypes.create_string_buffer(96)
        return text.value.decode(errors="replace") if self._ask(
            "Name", text, ctypes.c_uint(len(text))
        ) else None  # fmt: skip

    @property
    def uuid(self) -> str:
        """As nvidia-smi -L writes it; "" if not told."""
        text = ctypes.create_string_buffer(96)
        is_told = self._ask("UUID", text, ctypes.c_uint(len(text)))
        return text.value.decode(errors="replace") if is_told else ""

    @property
    def memory(self) -> tuple[int, int] | None:
        """(all, free) bytes"""
        memory = _Memory()
        is_told = self._ask("MemoryInfo", ctypes.byref(memory))
        return (memory.total, memory.free) if is_told else None

    @property
    def arch(self) -> int | None:
        """Compute capability, as 70."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        call = ctypes.byref(major), ctypes.byref(minor)
        is_told = self._ask("CudaComputeCapability", *call)
        return 10 * major.value + minor.value if is_told else None

    @property
    def bus(self) -> str:
        """As /sys writes it: 0000:04:00.0; "" if not told."""
        pci = _Pci()
        is_told = self._ask("PciInfo_v3", ctypes.byref(pci))
        return bus_of(pci.bus) if is_told else ""

    def clock(self, kind: int) -> int:
        """The highest, in MHz; 0: not told."""
        return self.number("MaxClockInfo", kind) or 0

    def reaches(self, other: Card, how: int) -> bool | None:
        """Whether the driver lets it read or write the other's memory."""
        status = ctypes.c_uint()
        call = other._handle, ctypes.c_int(how), ctypes.byref(status)
        return status.value == 0 if self._ask("P2PStatus", *call) else None

    def links(self) -> list[NvLink]:
        """Its NVLinks that are up."""
        found = []
        for number in map(ctypes.c_uint, range(MOST_LINKS)):
            if not self.number("NvLinkState", number):
                continue
            pci = _Pci()
            self._ask("NvLinkRemotePciInfo_v2", number, ctypes.byref(pci))
            kind = self.number("NvLinkRemoteDeviceType", number)
            speed = LINK_SPEED.get(self.number("NvLinkVersion", number) or 2, 25e9)
            found.append(NvLink(PEER_IS_GPU if kind is None else kind, bus_of(pci.bus), speed))
        return found

    def processes(self) -> dict[int, int]:
        """Bytes by process that computes there, as far as this user may know; 0: not told."""
        count = ctypes.c_uint(MOST_PROCESSES)
        found = (_Process * MOST_PROCESSES)()
        call = ctypes.byref(count), found
        if not self._ask("ComputeRunningProcesses_v3", *call):
            return {}
        told = found[: count.value]
        return {each.pid: each.used if each.used != UNKNOWN_SIZE else 0 for each in told}

    def _ask(self, what: str, *args: Any) -> bool:
        return self._nvml.ask(f"nvmlDeviceGet{what}", self._handle, *args)


def bus_of(text: bytes) -> str:
    """Of "00000000:04:00.0"."""
    domain, _, rest = text.decode(errors="replace").lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else ""


@contextlib.contextmanager
def opened() -> Iterator[Nvml | None]:
    """The library, ready; None where there is no driver."""
    for path in LIBRARIES:
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        if library.nvmlInit_v2() != 0:
            break
        try:
            yield Nvml(library)
        finally:
            library.nvmlShutdown()
        return
    yield None
