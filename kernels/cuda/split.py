"""Heads of queries and of gates that lie in turn in what a product made, taken from there.

A Part is an array that nobody has made: every other run of `dim` values. What reads heads one by
one anyway takes it where it is (rope_store, gates of attention); whoever asks for its address has
it made first. Knows neither cupy nor models.
"""

from __future__ import annotations

import numpy as np
from voltapile.kernels.cuda.launch import DeviceArray, Instance, Launcher

SPLIT = Instance("route.cu", "split_heads", waits=True)
GATE = Instance("attention_gate.cu", "gate_heads", waits=True)
INSTANCES = [SPLIT, GATE]
MAX_TOKENS = 65535  # a grid's limit on its second axis


class Part(DeviceArray):
    """The first or the second `dim` values of each head of x [T, H * 2 * dim], [T, H * dim]."""

    __slots__ = ("_is_second", "_ops", "_place", "dim", "is_late", "x")

    def __init__(self, ops: Launcher, x: DeviceArray, dim: int, is_second: bool) -> None:
        self._ops, self.x, self.dim, self._is_second = ops, x, dim, is_second
        self._place = ops.scratch((len(x), x.shape[1] // 2))
        self.is_late = True
        super().__init__(self._place.ptr, self._place.shape, x.dtype, self._place.owner)

    @property
    def ptr(self) -> int:
        if self.is_late and self.size:
            self.is_late = False
            _make(self._ops, self.x, self.dim, self._place, self._is_second)
        return self._place.ptr

    @ptr.setter
    def ptr(self, value: int) -> None:
        assert value == self._place.ptr, "an array stays where it is"

    def lies(self) -> tuple[int, int]:
        """Where it is in x, and from one head to the next."""
        assert self.is_late
        return self.x.ptr + self._is_second * self.dim * self.x.dtype.itemsize, 2 * self.dim

    def take(self) -> tuple[int, int]:
        """The same, for a kernel that writes what becomes of it to its place."""
        found = self.lies()
        self.is_late = False
        return found


def split_heads(ops: Launcher, x: DeviceArray, dim: int) -> tuple[Part, Part]:
    assert x.shape[1] % (2 * dim) == 0, (x, dim)
    ops.kernel(SPLIT)  # to be there in any case
    return Part(ops, x, dim, False), Part(ops, x, dim, True)


def late_part(x: DeviceArray) -> Part | None:
    return x if isinstance(x, Part) and x.is_late else None


def gate_place(gate: DeviceArray, dim: int) -> tuple[int, int]:
    """Where gates of heads of `dim` are, and from one to the next."""
    late = late_part(gate)
    return (gate.ptr, dim) if late is None or late.dim != dim else late.lies()


def gate_(ops: Launcher, y: DeviceArray, place: tuple[int, int], dim: int) -> DeviceArray:
    """y [T, H * dim] *= sigmoid of gates, which are where gate_place says."""
    tokens, width = y.shape
    for start in range(0, tokens, MAX_TOKENS):
        own = y[start : start + MAX_TOKENS]
        gate = place[0] + 4 * start * width // dim * place[1]
        numbers = np.int32(width), np.int32(dim), np.int32(place[1])
        ops.kernel(GATE)((-(-width // 256), len(own)), 256, (own.ptr, gate, *numbers))
    return y


def _make(ops: Launcher, x: DeviceArray, dim: int, place: DeviceArray, is_second: bool) -> None:
    """The kernel makes both parts: the other one has no place that is its own."""
    tokens, width = x.shape
    with ops.scope():
        outs = [place, ops.scratch(place.shape)]
        first, second = outs[::-1] if is_second else outs
        numbers = np.int32(width), np.int32(dim)
        pointers, grid = (x.ptr, first.ptr, second.ptr), (tokens, -(-width // 256))
        ops.kernel(SPLIT)(grid, 256, (*pointers, *numbers))
