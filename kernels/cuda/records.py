"""Tokens as products of several rows read them, made once for all blocks: csrc/matmul_staged.cu.

A record is a token's part of 256 columns, as halves in the order that a format's product wants.
Knows sizes and launches; which product takes records is said by clusters.py and wide.py.
"""

from __future__ import annotations

import numpy as np
from voltapile.kernels.cuda import stream
from voltapile.kernels.cuda.chunks import CHUNKS
from voltapile.kernels.cuda.launch import DeviceArray, Instance, Launcher

FORMATS = [name for name, chunk in CHUNKS.items() if chunk.is_block]
MIXED = [pair for pair in stream.MIXED if set(pair) <= set(FORMATS)]
PAIRS = [*((name, name) for name in FORMATS), *MIXED]
COLUMNS, CHUNKS_OF_A_BLOCK = 256, 8


def _instance(pair: tuple[str, str]) -> Instance:
    named = (("FORMAT", pair[0]), ("OTHER", pair[1]), ("MANY", "2"))
    return Instance("matmul_staged.cu", "stage_tokens", named, is_exact=True, waits=True)


STAGED = {pair: _instance(pair) for pair in PAIRS}
INSTANCES = list(STAGED.values())


def record_bytes(name: str, columns: int, tokens: int) -> int:
    return columns // COLUMNS * CHUNKS[name].token_bytes * tokens


def made(ops: Launcher, x: DeviceArray, pair: tuple[str, str], has_both: bool) -> tuple[int, int]:
    """Where records of x are for each format of a launch's pair, until the scope ends; 0 for one
    that takes none."""
    tokens, columns = x.shape
    names = [name for name in dict.fromkeys(pair if has_both else pair[:1]) if name in FORMATS]
    if not names:
        return 0, 0
    found = {
        name: ops.scratch((record_bytes(name, columns, tokens),), np.uint8).ptr for name in names
    }
    ops.kernel(STAGED[names[0], names[-1]])(
        (-(-columns // (COLUMNS * CHUNKS_OF_A_BLOCK)), tokens * len(names)),
        32 * CHUNKS_OF_A_BLOCK,
        (x.ptr, found[names[0]], found[names[-1]], np.int32(columns), np.int32(tokens)),
    )
    return found.get(pair[0], 0), found.get(pair[1], 0)
