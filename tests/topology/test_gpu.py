"""What the driver tells becomes Gpu records; a driver that is not there is no error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from voltapile.topology import gpu


class FakeNvml:
    """Two GPUs of which the second does not answer."""

    def __init__(self) -> None:
        self.is_shut = False

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> None:
        self.is_shut = True

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 15 if index.value else 0

    def nvmlDeviceGetName(self, handle: Any, name: Any, room: Any) -> int:
        name.value = b"Tesla V100-SXM2-16GB"
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.free = 16 << 30, 15 << 30
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 7, 0
        return 0

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: int, mhz: Any) -> int:
        assert kind == 2
        mhz._obj.value = 877
        return 0

    def nvmlDeviceGetMemoryBusWidth(self, handle: Any, bits: Any) -> int:
        bits._obj.value = 4096
        return 0


class OldNvml(FakeNvml):
    """A driver that does not know the question."""

    nvmlDeviceGetMemoryBusWidth = property()  # type: ignore[assignment]


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setattr(gpu.ctypes, "CDLL", lambda path: nvml)
    assert gpu.probe_gpus() == [
        gpu.Gpu(
            index=0,
            name="Tesla V100-SXM2-16GB",
            arch=70,
            memory_bytes=16 << 30,
            free_bytes=15 << 30,
            bandwidth=877e6 * 2 * 4096 / 8,
        )
    ]
    assert nvml.is_shut


def test_an_old_driver_tells_no_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.ctypes, "CDLL", lambda path: OldNvml())
    assert [each.bandwidth for each in gpu.probe_gpus()] == [0.0]


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def none() -> Iterator[None]:
        yield None

    monkeypatch.setattr(gpu, "_library", none)
    assert gpu.probe_gpus() == []
