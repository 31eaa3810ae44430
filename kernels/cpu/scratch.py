"""Scratch memory of a step: one arena of the planned size, handed out from the bottom up.

Arrays are views of the arena; a scope gives back what was made inside. Knows nothing of what the
arrays hold. More than the plan is a MemoryError that names the numbers.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Any

import numpy as np

ALIGNMENT = 64


def aligned_bytes(nbytes: int) -> np.ndarray:
    """nbytes of zeros that begin at a multiple of ALIGNMENT; untouched pages cost no memory."""
    memory = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


def counted_bytes(taken: Counter[str], purpose: str, nbytes: int) -> np.ndarray:
    """The same, counted in `taken`."""
    taken[purpose] += nbytes
    return aligned_bytes(nbytes)


class Scratch:
    """A bump allocator. peak: the most bytes that were ever in use at once."""

    def __init__(self, nbytes: int) -> None:
        self.planned = nbytes
        self.used = 0
        self.peak = 0
        self._arena = aligned_bytes(nbytes)

    def array(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        start = self.used
        nbytes = np.dtype(dtype).itemsize
        for length in shape:
            nbytes *= length
        end = start + -(-nbytes // ALIGNMENT) * ALIGNMENT
        if end > self.planned:
            raise MemoryError(
                f"scratch: an array of {nbytes} bytes does not fit: {start} of the planned "
                f"{self.planned} bytes are in use"
            )
        self.used = end
        self.peak = max(self.peak, end)
        return np.ndarray(shape, dtype, self._arena, start)

    def scope(self) -> Scope:
        return Scope(self)

    def reset(self) -> None:
        self.used = 0


class Scope:
    """Gives back at its end what was handed out since its begin."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def __enter__(self) -> None:
        self._start = self._scratch.used

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._scratch.used = self._start
