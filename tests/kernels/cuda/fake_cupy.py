"""Enough of cupy to load a model on a GPU that is not there: memory is counted, kernels do nothing
and copies nothing either, unless both of their ends are the host's (`copies`).

`install` puts it in the place of cupy until the test ends. What asks the driver for memory is a
request; the GPU refuses one that is too large for what is free, or the one numbered `refused`.
"""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

OURS = [
    f"voltapile.kernels.cuda.{name}" for name in ("device", "memory", "loader", "ops", "family_ops")
]


class Failure(Exception):
    """An error of the driver or of a library, by number."""

    def __init__(self, status: int) -> None:
        super().__init__(f"error {status}")
        self.status = status


class CUDARuntimeError(Failure):
    pass


class CUDADriverError(Failure):
    pass


class CUBLASError(Failure):
    pass


class Gpu:
    """The one GPU. requests: what asked for memory so far."""

    """log: what was submitted, and where: see test_states.py."""

    def __init__(self, total: int = 64 << 30, refused: int = -1, copies: bool = False) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.total, self.refused, self.copies = total, refused, copies
        self.used: dict[int, int] = {}
        self.host: dict[int, Any] = {}
        self.registered: list[int] = []  # host memory that others have made
        self.requests: list[str] = []
        self.launches: list[str] = []
        self.replays = self.streams = 0
        self._next = 1 << 40

    @property
    def free(self) -> int:
        return self.total - sum(self.used.values())

    def request(self, what: str, nbytes: int, error: type[Failure], status: int) -> int:
        self.requests.append(what)
        if len(self.requests) - 1 == self.refused or nbytes > self.free:
            raise error(status)
        start = self._next
        self._next += (nbytes // 256 + 1) * 256
        self.used[start] = nbytes
        return start

    # --- the runtime --------------------------------------------------------------------------
    def malloc(self, nbytes: int) -> int:
        return self.request("memory", nbytes, CUDARuntimeError, 2)

    def give_back(self, ptr: int) -> None:
        if ptr == 0:
            self.request("context", 0, CUDARuntimeError, 2)
        self.used.pop(ptr, None)

    def host_alloc(self, nbytes: int, flags: int) -> int:
        self.request("host memory", 0, CUDARuntimeError, 2)
        buffer = ctypes.create_string_buffer(nbytes)
        self.host[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def register(self, address: int, nbytes: int, flags: int) -> None:
        self.registered.append(address)

    def copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self.log.append(("copy", stream, kind, nbytes))
        if self.copies:
            ctypes.memmove(target, source, nbytes)

    def properties(self, number: int) -> dict[str, Any]:
        facts = {"name": b"A card", "major": 7, "minor": 0, "multiProcessorCount": 80}
        return {**facts, "totalGlobalMem": self.total}


class Function:
    ptr = 0

    def __init__(self, gpu: Gpu, name: str) -> None:
        self._gpu, self._name = gpu, name

    def __call__(self, *args: Any, **options: Any) -> None:
        self._gpu.launches.append(self._name)
        self._gpu.log.append(("launch", options["stream"].ptr, self._name))


def install(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError, setDevice=_nothing, getDeviceProperties=gpu.properties,
        getDeviceCount=lambda: 1, malloc=gpu.malloc, free=gpu.give_back, hostAlloc=gpu.host_alloc,
        freeHost=gpu.host.pop, memGetInfo=lambda: (gpu.free, gpu.total), memcpyAsync=gpu.copy,
        memsetAsync=_nothing, streamCaptureModeRelaxed=2, runtimeGetVersion=lambda: 12040,
        hostRegister=gpu.register, hostUnregister=gpu.registered.remove,
        pointerGetAttributes=lambda address: SimpleNamespace(devicePointer=address),
    )  # fmt: skip

    class Event:
        ptr, done = 0, True

        def __init__(self, **options: Any) -> None:
            pass

        def record(self, stream: Any) -> None:
            gpu.log.append(("record", stream.ptr, self))

        def synchronize(self) -> None:
            gpu.log.append(("host waits", self))

    class Stream:
        begin_capture = staticmethod(_nothing)

        def __init__(self, **options: Any) -> None:
            gpu.streams += 1
            self.ptr = gpu.streams

        def wait_event(self, event: Any) -> None:
            gpu.log.append(("wait", self.ptr, event))

        def synchronize(self) -> None:
            gpu.log.append(("host waits", self))

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

        def end_capture(self) -> Any:
            gpu.request("graph", 0, CUDARuntimeError, 2)
            return SimpleNamespace(upload=_nothing, launch=replay)

    def replay(stream: Any) -> None:
        gpu.replays += 1

    class Module:
        def load(self, code: bytes) -> None:
            gpu.request("module", 0, CUDADriverError, 2)

        def get_function(self, name: str) -> Any:
            return Function(gpu, name)

    def create() -> int:
        return gpu.request("cuBLAS", 0, CUBLASError, 3)

    cuda = SimpleNamespace(
        Stream=Stream, Event=Event, function=SimpleNamespace(Module=Module), runtime=runtime
    )
    cublas = SimpleNamespace(CUBLASError=CUBLASError, create=create)
    driver = SimpleNamespace(
        CUDADriverError=CUDADriverError,
        funcSetAttribute=_nothing,
        funcGetAttribute=lambda *_: 100,  # registers of a thread
    )
    modules = {
        "cupy": {"cuda": cuda}, "cupy.cuda": vars(cuda), "cupy_backends": {},
        "cupy_backends.cuda": {}, "cupy_backends.cuda.api": {"driver": driver},
        "cupy_backends.cuda.libs": {"cublas": cublas},
    }  # fmt: skip
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    calls = ("SetStream_v2", "SetWorkspace_v2", "GemmEx")
    found = SimpleNamespace(**{f"cublas{name}": lambda *_: 0 for name in calls})
    monkeypatch.setattr("voltapile.kernels.cuda.cublas.load_cublas", lambda version: found)
    for name in OURS:  # those that hold the real one, or another test's
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]


def _nothing(*_: Any, **options: Any) -> None:
    pass
