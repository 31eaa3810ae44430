"""Formats that are not multiplied as their files have them: NVFP4, whose factors are elsewhere.

Each block gets the factor of its tensor or expert in front, so that kernels know one kind of
weight. It is done in pieces while a tensor is uploaded. Knows bytes; no device.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from voltapile.kernels.cuda.chunks import REPACKED
from voltapile.shm.formats import format_of

PIECE = 1 << 18  # blocks that are made at once


def repacked(
    data: np.ndarray, type_name: str, factors: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """Pieces of uint8, one behind another, in the format REPACKED[type_name].

    data: uint8, a file's blocks. factors: float32[E] for E equal parts of them; None: 1."""
    blocks = data.reshape(-1, format_of(type_name).block_bytes)
    wide = format_of(REPACKED[type_name]).block_bytes
    factors = np.ones(1, np.float32) if factors is None else factors.astype(np.float32)
    for part, factor in zip(np.split(blocks, len(factors)), factors, strict=True):
        for first in range(0, len(part), PIECE):
            some = part[first : first + PIECE]
            made = np.empty((len(some), wide), np.uint8)
            made[:, :4] = np.frombuffer(factor.tobytes(), np.uint8)
            made[:, 4:] = some
            yield made.reshape(-1)
