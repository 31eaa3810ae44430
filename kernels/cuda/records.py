"""Tokens as products of several rows read them, made once for all blocks: csrc/matmul_staged.cu.

A record is a token's part of 256 columns, as halves in the order that a format's product wants. A
norm that is late (norms.py) is computed on the way. Knows sizes and launches; which product takes
records is said by clusters.py and wide.py.
"""

from __future__ import annotations

import numpy as np
from voltapile.kernels.cuda import stream
from voltapile.kernels.cuda.chunks import CHUNKS, spread
from voltapile.kernels.cuda.launch import DeviceArray, Instance, Launcher
from voltapile.kernels.cuda.norms import late_norm

FORMATS = [name for name, chunk in CHUNKS.items() if chunk.is_block]
MIXED = [pair for pair in stream.MIXED if set(pair) <= set(FORMATS)]
PAIRS = [*((name, name) for name in FORMATS), *MIXED]
COLUMNS, CHUNKS_OF_A_BLOCK = 256, 8
LONGEST = 8192  # columns of a row that is normed: a warp each COLUMNS


def _instance(function: str, pair: tuple[str, str]) -> Instance:
    named = (("FORMAT", pair[0]), ("OTHER", pair[1]), ("MANY", "2"))
    return Instance("matmul_staged.cu", function, named, is_exact=True, waits=True)


STAGED = {pair: _instance("stage_tokens", pair) for pair in PAIRS}
NORMED = {pair: _instance("norm_tokens", pair) for pair in PAIRS}
INSTANCES = [*STAGED.values(), *NORMED.values()]


def record_bytes(name: str, columns: int, tokens: int) -> int:
    return columns // COLUMNS * CHUNKS[name].token_bytes * tokens


def made(
    ops: Launcher, x: DeviceArray, pair: tuple[str, str], has_both: bool, is_only: bool = False
) -> tuple[int, int]:
    """Where records of x are for each format of a launch's pair, until the scope ends; 0 for one
    that takes none. is_only: nobody else needs a late norm's rows, which are 16 KB of the 41 that a
    norm of 4,096 columns moves; the norm is still late then."""
    tokens, columns = x.shape
    names = [name for name in dict.fromkeys(pair if has_both else pair[:1]) if name in FORMATS]
    if not names:
        return 0, 0
    found = {
        name: ops.scratch((record_bytes(name, columns, tokens),), np.uint8).ptr for name in names
    }
    pair_of_names, norm = (names[0], names[-1]), late_norm(x)
    places, sizes = (found[names[0]], found[names[-1]]), (np.int32(columns), np.int32(tokens))
    if norm is not None and columns <= LONGEST:
        numbers = np.float32(1) / np.float32(columns), np.float32(norm.eps)
        is_told = is_only and set(pair if has_both else pair[:1]) <= set(FORMATS)
        out = 0 if is_told else norm.take()
        ops.kernel(NORMED[pair_of_names])(
            (tokens,),
            32 * (columns // COLUMNS),
            (norm.x.ptr, norm.weight.ptr, out, *places, *sizes, *numbers),
            shared=spread(ops.arch, 1),
        )
    else:
        ops.kernel(STAGED[pair_of_names])(
            (-(-columns // (COLUMNS * CHUNKS_OF_A_BLOCK)), tokens * len(names)),
            32 * CHUNKS_OF_A_BLOCK,
            (x.ptr, *places, *sizes),
            shared=spread(ops.arch, 2),
        )
    return found.get(pair[0], 0), found.get(pair[1], 0)
