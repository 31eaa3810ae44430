"""Host memory that this GPU reads where it lies: page-locked in pieces, and let go of at the end.

One piece at a time, so that a huge table does not hold the driver up for long. Slower than VRAM by
far: for what is read a little of. Knows addresses, not what lies there.
"""

from __future__ import annotations

import resource
import weakref
from typing import Any

import numpy as np

PIECE = 1 << 30
PAGE = 4096


class Pinned:
    """address: where the GPU sees the memory. The array lives as long as this."""

    def __init__(self, device: Any, memory: np.ndarray) -> None:
        """memory: contiguous bytes, of whole pages. Raises MemoryError."""
        begin = memory.ctypes.data
        assert memory.flags.c_contiguous, "one piece of memory"
        assert begin % PAGE == 0, "whole pages"
        pieces: list[int] = []
        self.nbytes = memory.nbytes
        weakref.finalize(self, _let_go, device, pieces, memory)
        seen = [_pin(device, begin, memory.nbytes, start, pieces) for start in
                range(0, memory.nbytes, PIECE)]  # fmt: skip
        self.address = seen[0]
        if seen != [seen[0] + PIECE * place for place in range(len(seen))]:
            raise MemoryError("the GPU sees the pieces of page-locked memory in several places")


def _pin(device: Any, begin: int, nbytes: int, start: int, pieces: list[int]) -> int:
    size = min(PIECE, nbytes - start)
    try:
        address = int(device.register(begin + start, size))
    except device.failure as error:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        shown = f"{limit >> 10} KiB" if limit >= 0 else "unlimited"
        raise MemoryError(
            f"{size} bytes of host memory cannot be page-locked for the GPU ({error}); ulimit -l "
            f"is {shown}: use LimitMEMLOCK=infinity, --ulimit memlock=-1 for a container, or keep "
            "them in VRAM with -ot embed=vram"
        ) from None
    pieces.append(begin + start)
    return address


def _let_go(device: Any, pieces: list[int], memory: np.ndarray) -> None:
    """memory: kept until here."""
    for address in pieces:
        device.unregister(address)
