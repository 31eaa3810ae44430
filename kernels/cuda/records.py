"""Tokens as products of several rows read them, made once for all blocks: csrc/matmul_staged.cu.

A record is a token's part of 256 columns, as halves in the order that a format's product wants.
Tokens that are seated lie as the tensor core reads several of them, those of a turn together. A
norm that is late (norms.py) is computed on the way. Knows sizes and launches; which product takes
records is said by clusters.py and wide.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from voltapile.kernels.cuda import stream
from voltapile.kernels.cuda.chunks import CHUNKS
from voltapile.kernels.cuda.launch import DeviceArray, Instance, Launcher
from voltapile.kernels.cuda.norms import late_norm
from voltapile.kernels.cuda.spread import spread

FORMATS = [name for name, chunk in CHUNKS.items() if chunk.is_block]
MIXED = [pair for pair in stream.MIXED if set(pair) <= set(FORMATS)]
PAIRS = [*((name, name) for name in FORMATS), *MIXED]
COLUMNS, CHUNKS_OF_A_BLOCK = 256, 8
LONGEST = 8192  # columns of a row that is normed: a warp each COLUMNS
APART = ("Q6_K",)  # where a lane of sm_80's takes columns that are no neighbours


def _instance(function: str, pair: tuple[str, str], is_seated: bool) -> Instance:
    defines = {"FORMAT": pair[0], "OTHER": pair[1], "MANY": "2", "SEATED": str(int(is_seated))}
    named = tuple(defines.items())
    return Instance("matmul_staged.cu", function, named, is_exact=True, waits=True)


_KEYS = [(pair, is_seated) for pair in PAIRS for is_seated in (False, True)]
STAGED = {key: _instance("stage_tokens", *key) for key in _KEYS}
NORMED = {key: _instance("norm_tokens", *key) for key in _KEYS}
INSTANCES = [*STAGED.values(), *NORMED.values()]


@dataclass(frozen=True)
class Seating:
    """Turns of `room` tokens, each of which has `seats` places; none: tokens are not seated."""

    room: int
    seats: int

    def record_bytes(self, name: str, columns: int, tokens: int) -> int:
        places = -(-tokens // self.room) * self.seats if self.seats else tokens
        return columns // COLUMNS * CHUNKS[name].token_bytes * places


NONE = Seating(0, 0)


def made(
    ops: Launcher,
    x: DeviceArray,
    pair: tuple[str, str],
    has_both: bool,
    is_only: bool = False,
    seating: Seating = NONE,
) -> tuple[int, int]:
    """Where records of x are for each format of a launch's pair, until the scope ends; 0 for one
    that takes none. is_only: nobody else needs a late norm's rows, which are 16 KB of the 41 that a
    norm of 4,096 columns moves; the norm is still late then."""
    tokens, columns = x.shape
    names = [name for name in dict.fromkeys(pair if has_both else pair[:1]) if name in FORMATS]
    if not names:
        return 0, 0
    found = {
        name: ops.scratch((seating.record_bytes(name, columns, tokens),), np.uint8).ptr
        for name in names
    }
    key, norm = ((names[0], names[-1]), seating.seats > 0), late_norm(x)
    places = found[names[0]], found[names[-1]]
    sizes = tuple(map(np.int32, (columns, tokens, seating.room, seating.seats)))
    if norm is not None and columns <= LONGEST:
        numbers = np.float32(1) / np.float32(columns), np.float32(norm.eps)
        is_told = is_only and set(pair if has_both else pair[:1]) <= set(FORMATS)
        out = 0 if is_told else norm.take()
        ops.kernel(NORMED[key])(
            (tokens,),
            32 * (columns // COLUMNS),
            (norm.x.ptr, norm.weight.ptr, out, *places, *sizes, *numbers),
            shared=spread(ops, tokens, _norm_bytes(key[0])),
        )
    else:
        grid = -(-columns // (COLUMNS * CHUNKS_OF_A_BLOCK)), tokens * len(names)
        ops.kernel(STAGED[key])(
            grid,
            32 * CHUNKS_OF_A_BLOCK,
            (x.ptr, *places, *sizes),
            shared=spread(ops, grid[0] * grid[1], 0),
        )
    return found.get(pair[0], 0), found.get(pair[1], 0)


def _norm_bytes(pair: tuple[str, str]) -> int:
    """Of norm_tokens' own shared memory: a sum of each warp, and rows where lanes exchange them."""
    return LONGEST // COLUMNS * 4 + LONGEST * 4 * any(name in APART for name in pair)
