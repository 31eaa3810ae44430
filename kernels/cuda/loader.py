"""Kernels of one GPU: compiled or fetched from the cache when they are first asked for.

`ptx` is a folder of compute_70 PTX that was compiled beforehand: its kernels go through the
driver's own compiler, so that the Volta source runs on any later card. `rehearse` finds out which
kernels something needs without running them, so that they can be compiled side by side.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from voltapile.kernels.cuda.compile import compile_all, compile_instance, ptx_name
from voltapile.kernels.cuda.device import Device, Function
from voltapile.kernels.cuda.launch import Instance, Kernel

PTX_ARCH = 70
WAITS_FROM = 90  # compute capability


class Loader:
    def __init__(self, device: Device, ptx: Path | None = None) -> None:
        self.arch = device.arch if ptx is None else PTX_ARCH
        self._device, self._ptx = device, ptx
        self._functions: dict[Instance, Function] = {}
        self._wanted: set[Instance] | None = None  # while rehearsing

    @property
    def is_rehearsing(self) -> bool:
        return self._wanted is not None

    def kernel(self, instance: Instance) -> Kernel:
        if self._wanted is not None:
            self._wanted.add(instance)
            return self._launch_nothing
        if instance not in self._functions:
            self._load(instance, self._code(instance))
        return self._functions[instance]

    @contextmanager
    def rehearse(self) -> Iterator[None]:
        """Launches inside do nothing; at the end everything that they need is loaded."""
        self._wanted = set()
        try:
            yield
        finally:
            wanted, self._wanted = self._wanted, None
        missing = sorted(wanted - set(self._functions), key=lambda each: each.name)
        if self._ptx is None:
            codes = compile_all(missing, f"sm_{self.arch}", len(os.sched_getaffinity(0)))
        else:
            codes = [self._code(instance) for instance in missing]
        for instance, code in zip(missing, codes, strict=True):
            self._load(instance, code)

    def _load(self, instance: Instance, code: bytes) -> None:
        is_early = instance.waits and self.arch >= WAITS_FROM
        self._functions[instance] = self._device.function(code, instance.function, is_early)

    def _launch_nothing(
        self, grid: tuple[int, ...], block: int, args: tuple[Any, ...], shared: int = 0
    ) -> None:
        """What comes behind what is learned all the same."""
        self._device.trail.add(0)

    def _code(self, instance: Instance) -> bytes:
        if self._ptx is None:
            return compile_instance(instance, f"sm_{self.arch}")
        return (self._ptx / ptx_name(instance)).read_bytes()
