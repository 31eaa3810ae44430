"""Launches through the driver's cuLaunchKernelEx, which cupy does not offer, and calls of C between
them (cupy's are Python's, and once only).

A kernel that waits for its predecessor itself (csrc/grid.cuh) may start before that one ends; in a
graph this becomes a programmatic edge. Knows addresses and numbers; neither cupy nor instances.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
SLOT = 8  # bytes of an argument here


class LaunchError(RuntimeError):
    """The driver refused a launch."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = (ctypes.c_void_p,) * 4
    driver.cuLaunchHostFunc.argtypes = (ctypes.c_void_p,) * 3
    return driver


def call(function: int, argument: int, stream: int) -> None:
    """Of C, by a thread of the driver's, behind what was submitted before; what comes behind waits
    for it. A recorded step repeats the call. The function may not ask CUDA for anything."""
    status = _driver().cuLaunchHostFunc(stream, function, argument)
    if status:
        raise LaunchError(f"cuLaunchHostFunc: error {status} of the driver")


class Arguments:
    """Room for a kernel's arguments, each in slots of its own; filled anew for every launch.

    first: arguments of one launch, which tell the types; int is an address, an array a struct.
    """

    def __init__(self, first: Sequence[Any]) -> None:
        self._layout = struct.Struct("<" + "".join(map(_code, first)))
        self.slots = ctypes.create_string_buffer(max(SLOT, self._layout.size))
        start = ctypes.addressof(self.slots)
        sizes = [
            0,
            *(SLOT if isinstance(each, int) else _whole(each.nbytes) for each in first[:-1]),
        ]
        places = (start + place for place in itertools.accumulate(sizes))
        self.places = (ctypes.c_void_p * max(1, len(first)))(*places)

    def fill(self, args: Sequence[Any]) -> None:
        told = (each.tobytes() if isinstance(each, np.ndarray) else each for each in args)
        self._layout.pack_into(self.slots, 0, *told)


def _code(value: Any) -> str:
    """struct's letters for the slots that hold a value of this type."""
    if isinstance(value, int):
        return "Q"
    if isinstance(value, np.ndarray):
        return f"{_whole(value.nbytes)}s"
    kind = np.dtype(value.dtype)
    assert kind.str[1:] in ("i4", "u4", "f4", "i8", "u8", "f8"), kind
    letter = "f" if kind.kind == "f" else "i" if kind.kind == "i" else "I"
    wide = {"f": "d", "i": "q", "I": "Q"}
    return f"{letter}4x" if kind.itemsize == 4 else wide[letter]


def _whole(nbytes: int) -> int:
    return -(-nbytes // SLOT) * SLOT


class Submission:
    """Launches of one function; it starts early, so the kernel must wait itself."""

    def __init__(self, function: int) -> None:
        self._function = function
        self._attribute = _Attribute(EARLY)
        self._attribute.value[0] = 1
        self._config = _Config(attributes=ctypes.addressof(self._attribute), count=1)
        self._arguments: Arguments | None = None

    def launch(
        self, grid: Sequence[int], block: int, args: Sequence[Any], shared: int, stream: int
    ) -> None:
        if self._arguments is None:
            self._arguments = Arguments(args)
        self._arguments.fill(args)
        config = self._config
        config.grid[:] = (*grid, 1, 1)[:3]
        config.block[:] = (block, 1, 1)
        config.shared, config.stream = shared, stream
        status = _driver().cuLaunchKernelEx(
            ctypes.addressof(config), self._function, ctypes.addressof(self._arguments.places), None
        )
        if status:
            raise LaunchError(f"cuLaunchKernelEx: error {status} of the driver")
