"""How the product of many generated rows is dealt out on sm_90: csrc/matmul_cluster.cu.

Which formats and shapes it takes, how many clusters there are, and what a block of one holds in
shared memory. Nothing here changes bits. Knows sizes; launches nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from voltapile.kernels.cuda import stream
from voltapile.kernels.cuda.chunks import CHUNKS, Chunk
from voltapile.kernels.cuda.launch import Instance
from voltapile.kernels.cuda.tiles import ROWS

ARCH = 90  # alone: no other has the tensor cores that four warps use together
FROM, MOST, ROOM = 9, 64, 32  # rows, up to which they are usual; those of a turn
# Columns from which on records of tokens are worth a launch of their own; a late norm's cost none.
STAGED_FROM = 2048
CLASSES = 8  # of columns, and blocks of a cluster: the warps of csrc/matmul_rows.cu
# Warps of a block, in groups of four that multiply together.
CREWS = (8, 12, 16, 20)
GROUP = 4
# Of a multiprocessor; and how many warps of one have multiplied a chunk until the first has.
SCHEDULERS, LATENCY = 4, 5
# Boxes for sums that arrive, and chunks of a warp that are on their way at once: what fits first.
# One box does for a single round; else all warps meet after each.
MEMORY = [(2, 3), (2, 2), (2, 1), (1, 2), (1, 1)]
SHIFT = 20  # of what kernels multiply with instead of dividing
FORMATS = stream.FORMATS
PASSES = (2, 4)  # times eight tokens, that a kernel multiplies at once


def _crews(pair: tuple[str, str]) -> list[int]:
    """Two formats want more registers than 20 warps leave."""
    return [crew for crew in CREWS if pair[0] == pair[1] or crew <= 16]


def _instance(pair: tuple[str, str], passes: int) -> Instance:
    crew = max(_crews(pair))
    defines = {"FORMAT": pair[0], "OTHER": pair[1], "SPLIT": CLASSES, "CREW": crew}
    defines |= {"MANY": passes, "WARPS": CLASSES, "TILES": 1}
    named = tuple((key, str(value)) for key, value in defines.items())
    return Instance("matmul_cluster.cu", "matmul_cluster", named, is_exact=True, waits=True)


def instances() -> dict[tuple[tuple[str, str], int], Instance]:
    """By formats and times eight tokens."""
    pairs = [*((name, name) for name in FORMATS), *stream.MIXED]
    return {(pair, passes): _instance(pair, passes) for pair in pairs for passes in PASSES}


CLUSTER = instances()
INSTANCES = list(CLUSTER.values())


@dataclass(frozen=True)
class Deal:
    """clusters: of a turn of `room` tokens.
    crew: warps of a block. depth: of rings. boxes: for sums that arrive. numbers: what a kernel
    need not divide for, then."""

    clusters: int
    crew: int
    room: int
    passes: int
    depth: int
    boxes: int
    shared: int
    numbers: tuple[int, ...]


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
    shares = divmod(task.units, first), divmod(task.others, max(1, clusters - first))
    counts = [task.tiles * n for each, more in shares for n in (each, each + (more > 0)) if n]
    tiles = max(counts)
    slots = -(-task.columns // (256 * CLASSES))
    for crew, boxes, depth in _ways(task.pair, tiles, slots):
        own_boxes = 1 if tiles <= crew else boxes
        owners = crew if _is_shared(min(counts), slots, crew) else min(crew, tiles)
        most = max(_crews(task.pair))
        sizes = slots, 8 * passes, crew, owners, most, depth, own_boxes
        shared = max(_shared_bytes(part, *sizes) for part in parts)
        if shared <= task.most_shared:
            divisors = tuple(-(-(1 << SHIFT) // each) for each in (crew, slots))
            numbers = depth, own_boxes, owners, *divisors, *shares[0], first, *shares[1]
            return Deal(clusters, crew, room, passes, depth, own_boxes, shared, numbers)
    return None


def _ways(pair: tuple[str, str], tiles: int, slots: int) -> Iterator[tuple[int, int, int]]:
    """Warps, boxes and chunks on their way, the best first: what takes least time. The last tiles
    may be shared."""

    def cost(crew: int) -> int:
        rounds, left = divmod(tiles, crew)
        busy = GROUP * -(-left // GROUP)
        last = _step(busy * slots) if _is_shared(left, slots, crew) else slots * _step(busy)
        return rounds * slots * _step(crew) + (last if left else 0)

    for crew in sorted(_crews(pair), key=cost):
        yield from ((crew, *memory) for memory in MEMORY)


def _is_shared(left: int, slots: int, crew: int) -> bool:
    """Whether groups of warps take a chunk each of so many tiles, as struct Work has it."""
    return left < crew and GROUP * -(-left // GROUP) * slots <= crew


def _step(warps: int) -> int:
    """A chunk of so many warps, in what one takes of its scheduler's time."""
    return max(LATENCY, -(-warps // SCHEDULERS))


def _clusters(multiprocessors: int) -> int:
    """That are there at once: multiprocessors come in groups, of which each has some to spare."""
    return 15 * multiprocessors // 132 if multiprocessors >= 32 else multiprocessors // CLASSES


def _shared_bytes(
    chunk: Chunk,
    slots: int,
    room: int,
    crew: int,
    owners: int,
    most: int,
    depth: int,
    boxes: int,
) -> int:
    """owners: warps that ever have a tile. most: that the kernel is compiled for."""
    warp = boxes * 64 * room + depth * ROWS * chunk.bytes + chunk.scale_bytes
    bells = 2 * most + crew * depth + slots
    return 8 * (bells + bells % 2) + owners * warp + slots * chunk.slot_bytes(room)
