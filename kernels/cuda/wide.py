"""How the product of several rows is dealt out on sm_80 and later: csrc/matmul_wide.cu.

Tokens become records first (records.py), once for all matrices of a format. Knows sizes; launches
nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from voltapile.kernels.cuda import records, stream
from voltapile.kernels.cuda.chunks import CHUNKS
from voltapile.kernels.cuda.launch import Instance

FROM = 2  # rows
PASS, ROOM = 8, 16  # tokens of one tile of the tensor core, and of a block
DEPTH = 2  # chunks of a warp that are on their way at once
BELLS = 128  # bytes, of a block
FORMATS, MIXED = records.FORMATS, records.MIXED


def _instance(file: str, function: str, **defines: object) -> Instance:
    named = tuple((key, str(value)) for key, value in defines.items())
    return Instance(file, function, named, is_exact=True, waits=True)


# By formats, and by whether there are more than PASS tokens.
WIDE = {
    (pair, more): _instance(
        "matmul_wide.cu", "matmul_wide", FORMAT=pair[0], OTHER=pair[1],
        DEPTH=DEPTH, WARPS=stream.WARPS, TILES=1, MANY=2 * more,
    )
    for pair in records.PAIRS
    for more in (0, 1)
}  # fmt: skip
INSTANCES = list(WIDE.values())


@dataclass(frozen=True)
class Deal:
    """blocks: of a launch, for each `room` tokens; those from first_other on take the other
    format."""

    blocks: int
    room: int
    first_other: int
    shared: int


@functools.lru_cache(maxsize=1024)
def deal(task: stream.Task) -> Deal | None:
    """As stream.deal."""
    pair, units, others = task.pair, task.units, task.others
    if (pair, 0) not in WIDE or task.tokens < FROM or not task.is_whole:
        return None
    turns = -(-task.tokens // ROOM)
    room = -(-task.tokens // turns)
    shared = max(_shared_bytes(name, room, task.tiles) for name in pair)
    if shared > task.most_shared:
        return None
    fitting = (task.most_shared + stream.RESERVED) // (shared + stream.RESERVED)
    slots = task.multiprocessors * (min(2, fitting) if room <= PASS else 1)
    blocks = min(max(2, slots // turns), units + others)
    first = stream.first_other(pair, blocks, units, others)
    return Deal(blocks, room, first, shared)


def _shared_bytes(name: str, room: int, tiles: int) -> int:
    chunk = CHUNKS[name]
    warp = DEPTH * stream.ROWS * chunk.bytes + 2 * chunk.token_bytes * room
    return BELLS + stream.WARPS * (_aligned(warp) + tiles * 64 * room)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 128) * 128
