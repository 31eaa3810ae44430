"""How matrices that kernels stream lie in the GPU's memory: tile by tile.

A tile is 16 rows, a chunk 256 of their columns. A tile has the bytes that its rows have in the
file, but chunk behind chunk, each of them row behind row: what a warp multiplies at once is
contiguous, and comes by one copy. A matrix that is not whole tiles, or that somebody cuts
elsewhere, lies as in the file. Knows bytes; no device.
"""

from __future__ import annotations

import numpy as np
from voltapile.shm.formats import row_bytes

FORMATS = ("Q4_K", "Q5_K", "Q6_K", "Q8_0")
ROWS, COLUMNS = 16, 256
LARGEST = 4 << 20  # bytes of a tile, for it travels whole


def has_tiles(type_name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight of this shape, (..., rows, columns), is whole tiles."""
    return (
        type_name in FORMATS
        and len(shape) > 1
        and shape[-2] % ROWS == 0
        and shape[-1] % COLUMNS == 0
        and ROWS * row_bytes(type_name, shape[-1]) <= LARGEST
    )


def in_tiles(data: np.ndarray, type_name: str, columns: int) -> np.ndarray:
    """A view of whole tiles as they shall lie, to be copied: uint8[tiles, chunks, 16, bytes].

    data: uint8, contiguous, rows as in the file."""
    row = row_bytes(type_name, columns)
    chunks = columns // COLUMNS
    return data.reshape(-1, ROWS, chunks, row // chunks).transpose(0, 2, 1, 3)
