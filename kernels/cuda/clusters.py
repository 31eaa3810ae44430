"""How the product of many generated rows is dealt out from sm_90 on: csrc/matmul_cluster.cu.

Which formats and shapes it takes, how many clusters there are, and what a block of one holds in
shared memory. Nothing here changes bits. Knows sizes; launches nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from voltapile.kernels.cuda import stream
from voltapile.kernels.cuda.chunks import CHUNKS, Chunk
from voltapile.kernels.cuda.launch import Instance

ARCH = 90  # from which on
FROM, MOST, ROOM = 9, 64, 32  # rows, up to which they are usual; those of a turn
# Columns from which on records of tokens are worth a launch of their own; a late norm's cost none.
STAGED_FROM = 8192
CLASSES = 8  # of columns, and blocks of a cluster: the warps of csrc/matmul_rows.cu
CREWS = (16, 18, 20)  # warps of a block: even, since a gate and its up are neighbours'
# Boxes for sums that arrive, and chunks of a warp that are on their way at once: what fits first.
# One box does for a single round; else all warps meet after each.
MEMORY = [(2, 3), (2, 2), (2, 1), (1, 2), (1, 1)]
FORMATS = stream.FORMATS
PASSES = (2, 4)  # times eight tokens, that a kernel multiplies at once


def _instance(pair: tuple[str, str], passes: int) -> Instance:
    defines = {"FORMAT": pair[0], "OTHER": pair[1], "SPLIT": CLASSES, "CREW": max(CREWS)}
    defines |= {"MANY": passes, "WARPS": CLASSES, "TILES": 1}
    named = tuple((key, str(value)) for key, value in defines.items())
    return Instance("matmul_cluster.cu", "matmul_cluster", named, is_exact=True, waits=True)


def instances() -> dict[tuple[tuple[str, str], int], Instance]:
    """By formats, and by times eight tokens."""
    pairs = [*((name, name) for name in FORMATS), *stream.MIXED]
    return {(pair, passes): _instance(pair, passes) for pair in pairs for passes in PASSES}


CLUSTER = instances()
INSTANCES = list(CLUSTER.values())


@dataclass(frozen=True)
class Deal:
    """clusters: of a turn of `room` tokens; those from first_other on take the other format.
    crew: warps of a block. depth: of rings. boxes: for sums that arrive."""

    clusters: int
    crew: int
    room: int
    passes: int
    first_other: int
    depth: int
    boxes: int
    shared: int


@functools.lru_cache(maxsize=1024)
def deal(task: stream.Task) -> Deal | None:
    """None if it is not this kernel's; then it is another's, with the same bits."""
    if (task.pair, PASSES[0]) not in CLUSTER or task.tokens < FROM or not task.is_whole:
        return None
    for turns in range(-(-task.tokens // ROOM), task.tokens + 1):
        found = _deal(task, turns)
        if found is not None:
            return found
    return None


def _deal(task: stream.Task, turns: int) -> Deal | None:
    """In so many turns, if tokens then fit."""
    room = -(-task.tokens // turns)
    passes = next(each for each in PASSES if 8 * each >= room)
    clusters = max(2, _clusters(task.multiprocessors) // turns)
    first = stream.first_other(task.pair, clusters, task.units, task.others)
    parts = [CHUNKS[name] for name in (task.pair if task.others else task.pair[:1])]
    tiles = task.tiles * -(-task.units // first)
    if task.others:
        tiles = max(tiles, -(-task.others // (clusters - first)))
    slots = -(-task.columns // (256 * CLASSES))
    for crew in sorted(CREWS, key=lambda crew: _steps(tiles, slots, crew)):
        for boxes, depth in MEMORY:
            own_boxes = 1 if tiles <= crew else boxes
            sizes = slots, passes, crew, depth, own_boxes
            shared = max(_shared_bytes(part, *sizes) for part in parts)
            if shared <= task.most_shared:
                return Deal(clusters, crew, room, passes, first, depth, own_boxes, shared)
    return None


def _steps(tiles: int, slots: int, crew: int) -> int:
    """Chunks that a warp multiplies one after the other; the last tiles may be shared."""
    rounds, left = divmod(tiles, crew)
    return rounds * slots + (0 if not left else 1 if left * slots <= crew else slots)


def _clusters(multiprocessors: int) -> int:
    """That are there at once: multiprocessors come in groups, of which each has some to spare."""
    return 15 * multiprocessors // 132 if multiprocessors >= 32 else multiprocessors // CLASSES


def _shared_bytes(chunk: Chunk, slots: int, passes: int, crew: int, depth: int, boxes: int) -> int:
    box = 512 * crew * passes
    ring = depth * _tile_bytes(chunk) + chunk.scale_bytes
    bells = 8 * (2 * max(CREWS) + slots + slots % 2)
    return (
        bells
        + _table_bytes(chunk)
        + boxes * box
        + crew * ring
        + slots * chunk.slot_bytes(8 * passes)
    )


def _vectors(chunk: Chunk) -> int:
    """Of 16 bytes, that a row's part of a chunk may touch."""
    return (chunk.bytes + (16 - chunk.align if chunk.bytes % 16 else 0) + 15) // 16


def _tile_bytes(chunk: Chunk) -> int:
    return 16 * 16 * (_vectors(chunk) | 1)


def _table_bytes(chunk: Chunk) -> int:
    return 128 * -(-16 * _vectors(chunk) // 32)
