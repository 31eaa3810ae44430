"""What a launcher sees: arrays and weights in device memory, kernel instances, who runs them.

A launcher checks shapes, picks an Instance, gets its Kernel from the Launcher (CudaOps) and calls
it with pointers and numbers. This file needs no GPU and no cupy, so that CI can list and compile
every instance anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from voltapile.kernels.cuda.trail import Trail


@dataclass(frozen=True)
class Instance:
    """One kernel: a file of csrc, its extern "C" function, what it is compiled with (-D)."""

    file: str
    function: str
    defines: tuple[tuple[str, str], ...] = ()
    is_exact: bool = False  # no multiply and add is contracted: the bits of the scalar formats
    waits: bool = False  # for its predecessor, itself, so that it may start early: csrc/grid.cuh

    @property
    def name(self) -> str:
        """For people, tables and pytest: function[FORMAT=Q4_K,ROWS=8]."""
        inside = ",".join(f"{key}={value}" for key, value in self.defines)
        return f"{self.function}[{inside}]" if inside else self.function


class DeviceArray:
    """A contiguous array in device memory. owner: keeps the memory alive."""

    __slots__ = ("dtype", "nbytes", "owner", "ptr", "shape", "size")

    def __init__(self, ptr: int, shape: Sequence[int], dtype: Any, owner: object = None) -> None:
        self.ptr, self.shape = ptr, tuple(int(length) for length in shape)
        self.dtype, self.owner = np.dtype(dtype), owner
        size = 1
        for length in self.shape:
            size *= length
        self.size = size
        self.nbytes = size * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: int | slice | tuple[int | slice, ...]) -> DeviceArray:
        """A contiguous view: x[i], x[a:b], or x[i, a:b] (all but the last are numbers)."""
        if not isinstance(key, tuple):
            return self._first_axis(key)
        assert all(not isinstance(part, slice) for part in key[:-1]), key
        view = self
        for part in key:
            view = view._first_axis(part)
        return view

    def _first_axis(self, key: int | slice) -> DeviceArray:
        row = self.nbytes // self.shape[0] if self.shape[0] else 0
        if isinstance(key, slice):
            start, stop, step = key.indices(self.shape[0])
            assert step == 1, key
            shape = (max(0, stop - start), *self.shape[1:])
            return DeviceArray(self.ptr + start * row, shape, self.dtype, self.owner)
        index = int(key)
        index += self.shape[0] if index < 0 else 0
        if not 0 <= index < self.shape[0]:
            raise IndexError(f"{key} in an axis of {self.shape[0]}")
        return DeviceArray(self.ptr + index * row, self.shape[1:], self.dtype, self.owner)

    def reshape(self, *shape: int) -> DeviceArray:
        """A view; one length may be -1."""
        known = 1
        for length in shape:
            known *= length if length >= 0 else 1
        whole = tuple(length if length >= 0 else self.size // max(1, known) for length in shape)
        view = DeviceArray(self.ptr, whole, self.dtype, self.owner)
        assert view.size == self.size, (self.shape, shape)
        return view

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype} {list(self.shape)} at {self.ptr:#x})"


@dataclass(eq=False)
class CudaWeight:
    """A matrix (N, K) quantised as in the file; or a vector in float32. is_tiled: see tiles.py;
    else rows lie one behind another."""

    shape: tuple[int, ...]
    nbytes: int
    type_name: str  # of a matrix its GGUF type; a vector is always "F32"
    ptr: int
    row_bytes: int
    owner: object = None
    is_tiled: bool = False

    @property
    def is_vector(self) -> bool:
        return len(self.shape) == 1


# What a kernel is told of the group over which it sums what it makes; () if it does not.
Line = tuple[int | np.int32, ...]


class Kernel(Protocol):
    """A loaded function. args: device addresses as int, numpy scalars for everything else."""

    def __call__(
        self, grid: tuple[int, ...], block: int, args: tuple[Any, ...], shared: int = 0
    ) -> None: ...


class Launcher(Protocol):
    """What launchers need of CudaOps."""

    multiprocessors: int
    arch: int  # compute capability as 70, 75, 90: of the machine code that runs
    trail: Trail  # what was launched before

    def kernel(self, instance: Instance) -> Kernel: ...

    def scratch(self, shape: tuple[int, ...], dtype: Any = np.float32) -> DeviceArray:
        """Uninitialised, until the enclosing scope ends or the step does."""

    def scope(self) -> AbstractContextManager[None]:
        """Scratch arrays made inside are free again at its end."""

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        """Persistent and zeroed; not while a step is captured."""

    def product(
        self, weight: DeviceArray, x: DeviceArray, out: DeviceArray, factor: float, adds: bool
    ) -> None:
        """out [T, N] = factor * x [T, K] @ weight[N, K].T (adds: added to out), by the library;
        halves as uint16, float32 sums."""

    def constant(self, values: np.ndarray) -> DeviceArray:
        """Small host values on the device, for ever; equal ones are kept once. Also in capture."""
