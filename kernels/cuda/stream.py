"""How the product of few rows is dealt out on sm_80 and later: csrc/matmul_stream.cu.

Which formats and shapes it takes, what a block holds in shared memory, how many blocks there are
and how those are split between two formats of one launch. Knows sizes; launches nothing. A Task is
what the modules beside it, clusters.py and wide.py, are asked about, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from voltapile.kernels.cuda.chunks import CHUNKS, Chunk
from voltapile.kernels.cuda.launch import Instance
from voltapile.shm.formats import row_bytes

ARCH, EARLY = 80, 90  # from which on, and from which on a kernel starts before the last has ended
WARPS, ROWS, TOKENS = 8, 16, 8
# A product norms tokens itself (norms.py) that are so many parts of 256 columns at most. Each block
# reads them twice, past two parts a warp from far away, which a launch for all blocks does once.
NORMED = 64
TEAMS = 2  # of WARPS warps, on a multiprocessor
RESERVED = 1024  # bytes of shared memory that every block takes beside its own
DEPTH = 2  # chunks of a warp that may be on their way at once, if there is room for them
FORMATS = ("Q4_K", "Q5_K", "Q6_K", "Q8_0")
MIXED = [("Q4_K", "Q6_K"), ("Q4_K", "Q5_K"), ("Q5_K", "Q6_K"), ("Q4_K", "Q8_0")]
PAIRS = [*((name, name) for name in FORMATS), *MIXED]
# Threads that a multiprocessor's registers suffice for: a block's own, so up to 128 registers each.
# Fewer leave attention's blocks more room to begin while a product ends, and were slower on an
# H200: an 8B in Q8_0 gave 357 tokens a second with 512 and 340 with 640, in Q4_K_M 396 with 512 and
# 379 with 768, which spills.
THREADS = 512
# For one token kernels are made that know it is one. A block of theirs has half of the registers of
# a multiprocessor, and of its memory: then the next product's blocks are there too, and their first
# weights come while this one ends. So many teams of a block make that.
LONE_TEAMS = {"Q4_K": 2, "Q5_K": 1, "Q6_K": 1, "Q8_0": 1}
LONG = 32  # units for each multiprocessor, from which on both halves are one product's


def _instance(
    pair: tuple[str, str], teams: int, warps: int = WARPS, is_alone: bool = False
) -> Instance:
    threads = THREADS * teams * warps // WARPS if is_alone else THREADS
    defines = {"FORMAT": pair[0], "OTHER": pair[1], "DEPTH": DEPTH, "TEAMS": teams, "WARPS": warps}
    defines |= {"THREADS": threads, "TILES": 1, "MANY": 0, "ONE": int(is_alone)}
    named = tuple((key, str(value)) for key, value in defines.items())
    return Instance("matmul_stream.cu", "matmul_stream", named, is_exact=True, waits=True)


# By formats and teams of a block. They share their tokens, and so a format; where there is no room
# for two of one of two formats, blocks have one.
STREAM = {(pair, teams): _instance(pair, teams) for pair in PAIRS for teams in (TEAMS,)}
STREAM |= {(pair, 1): _instance(pair, 1) for pair in MIXED}
# One team of twice as many warps, with a chunk each at most, where there are too few units for two.
BROAD = {(name, name): _instance((name, name), 1, 2 * WARPS) for name in FORMATS}
# Those for one token: by formats, and of twice as many warps.
ALONE = {
    pair: _instance(pair, min(map(LONE_TEAMS.__getitem__, pair)), WARPS, True) for pair in PAIRS
}
LONE_BROAD = {
    (name, name): _instance((name, name), 1, 2 * WARPS, True)
    for name in FORMATS
    if LONE_TEAMS[name] == TEAMS
}
# Of a rank's part of a sum, which goes to the other ranks at once; a block has some bytes more.
_SAME = [each[name, name] for each in (BROAD, ALONE) for name in FORMATS]
_SAME += [STREAM[(name, name), TEAMS] for name in FORMATS] + [*LONE_BROAD.values()]
PUSHING = {each: replace(each, defines=(*each.defines, ("PUSH", "1"))) for each in _SAME}
PUSHING_BYTES = 1024
_LONE = [*ALONE.values(), *LONE_BROAD.values()]
INSTANCES = [*STREAM.values(), *BROAD.values(), *_LONE, *PUSHING.values()]


@dataclass(frozen=True)
class Task:
    """One launch's product, and what the card has for it. rows, other_rows: of the matrices of the
    first format of the pair and of the other one."""

    pair: tuple[str, str]
    columns: int
    tokens: int
    rows: tuple[int, ...]
    other_rows: tuple[int, ...]
    is_glu: bool
    multiprocessors: int
    most_shared: int
    is_normed: bool = False  # tokens are to be normed first
    is_tiled: bool = True  # all matrices: tiles.py
    is_early: bool = True  # the next product starts before this one has ended

    @property
    def units(self) -> int:
        """A gate and its up are one."""
        return _units(self.rows[:1] if self.is_glu else self.rows)

    @property
    def others(self) -> int:
        return _units(self.other_rows)

    @property
    def tiles(self) -> int:
        """Of a unit."""
        return 2 if self.is_glu else 1

    @property
    def is_whole(self) -> bool:
        """Whether matrices are whole tiles, and lie so."""
        rows = self.rows + self.other_rows
        return self.is_tiled and self.columns % 256 == 0 and not any(n % ROWS for n in rows)


@dataclass(frozen=True)
class Deal:
    """teams: of a block. blocks: of the launch; those from first_other on take the other format.
    depth: of a warp's ring. is_alone: there is one token."""

    teams: int
    blocks: int
    first_other: int
    depth: int
    shared: int
    is_alone: bool
    warps: int = WARPS

    @property
    def threads(self) -> int:
        return 32 * self.teams * self.warps

    def instance(self, pair: tuple[str, str], pushes: bool = False) -> Instance:
        if self.is_alone:
            found = (ALONE if self.warps == WARPS else LONE_BROAD)[pair]
        else:
            found = STREAM[pair, self.teams] if self.warps == WARPS else BROAD[pair]
        return PUSHING[found] if pushes else found


def ring_bytes(chunk: Chunk, depth: int) -> int:
    """A warp's places for chunks of tiles, and its scales."""
    return _aligned(depth * ROWS * chunk.bytes + chunk.scale_bytes)


def shared_bytes(chunk: Chunk, teams: int, depth: int, task: Task) -> int:
    bells = _aligned(8 * (DEPTH * teams * WARPS + 1))
    warp = ring_bytes(chunk, depth) + 2 * task.tiles * 64 * task.tokens
    chunks = -(-task.columns // (32 * chunk.groups))
    gains = 4 * task.columns if task.is_normed else 0
    return bells + teams * WARPS * warp + _aligned(chunks * chunk.slot_bytes(task.tokens)) + gains


@functools.lru_cache(maxsize=1024)
def deal(task: Task) -> Deal | None:
    """None if it does not fit: then the product is matmul_rows.cu's, with the same bits, and norms
    are launches of their own."""
    pair = task.pair
    if pair not in PAIRS or task.tokens > TOKENS or not task.is_whole:
        return None
    if task.is_normed and not _norms(task):
        return None
    if task.tokens == 1 and task.is_early:
        found = _dealt(task, min(map(LONE_TEAMS.__getitem__, pair)), True)
        if found is not None:
            return found
    return _dealt(task, TEAMS, False) or _dealt(task, 1, False)


def _dealt(task: Task, teams: int, is_alone: bool) -> Deal | None:
    """To blocks of so many teams."""
    pair, own, others = task.pair, task.units, task.others
    # Of one token's blocks the second that fits is the next product's.
    fitting, depth, shared = _room(task, teams, 2 if is_alone else TEAMS // teams)
    is_shared = is_alone and own + others < LONG * task.multiprocessors
    blocks = min(task.multiprocessors * (min(1, fitting) if is_shared else fitting), own + others)
    if not fitting or (blocks < 2 and others) or not (is_alone or (pair, teams) in STREAM):
        return None
    if teams == TEAMS and _is_broad(task):
        return Deal(1, blocks, blocks, depth, shared, is_alone, TEAMS * WARPS)
    first = first_other(pair, blocks, -(-own // teams), -(-others // teams))
    return Deal(teams, blocks, first, depth, shared, is_alone)


def _room(task: Task, teams: int, most: int) -> tuple[int, int, int]:
    """Blocks on a multiprocessor, `most` at most; their rings, as deep as that many allow; bytes of
    a block."""
    parts, ways = {*task.pair} if task.others else {task.pair[0]}, []
    for depth in range(2, DEPTH + 1):
        shared = max(shared_bytes(CHUNKS[name], teams, depth, task) for name in parts)
        fitting = min(most, (task.most_shared + RESERVED) // (shared + RESERVED))
        ways.append((fitting, depth, shared))
    return max(ways)


def can_push(task: Task) -> bool:
    """Whether PUSHING has a product's instance, and its blocks room for what that takes."""
    found = deal(task) if task.tokens else None
    room = task.most_shared - PUSHING_BYTES
    return found is not None and found.instance(task.pair) in PUSHING and found.shared <= room


def placed(
    task: Task, others: int, matrices: Sequence[int | np.int32]
) -> tuple[list[int | np.int32], list[int]]:
    """As the kernel counts units, those of each format apart: matrices moved to where they would
    begin if the first unit of their format were theirs, and units up to each one's end.

    matrices: weights, bias, what they make and rows of each; others: whose format is the second."""
    args: list[int | np.int32] = []
    ends: tuple[list[int], list[int]] = [], []
    counts = [0, 0]
    for m in range(len(matrices) // 4):
        *places, rows = matrices[4 * m : 4 * m + 4]
        kind, units = others >> m & 1, int(rows) // ROWS
        is_up = task.is_glu and m == 1  # which goes along with its gate
        start = 0 if is_up else counts[kind]
        tile, vector = ROWS * row_bytes(task.pair[kind], task.columns), 4 * ROWS
        for place, size in zip(places, (tile, vector, vector), strict=True):
            args.append(place and int(place) - start * size)
        args.append(rows)
        counts[kind] += 0 if is_up else units
        for each in (0, 1):
            ends[each].append(counts[each])
    return args, ends[0] + ends[1]


def _norms(task: Task) -> bool:
    return task.tokens * task.columns // 256 <= NORMED


def _is_broad(task: Task) -> bool:
    """Whether a warp has fewer chunks one after the other in blocks of one broad team, which has
    one of each unit, than in teams, which have two."""
    chunks, card = task.columns // 256, task.multiprocessors
    broad, teams = -(-task.units // card), 2 * -(-task.units // (TEAMS * card))
    return task.pair in BROAD and WARPS < chunks <= TEAMS * WARPS and broad < teams


def first_other(pair: tuple[str, str], blocks: int, units: int, others: int) -> int:
    """So that the two formats take about the same time."""
    if not others:
        return blocks
    costs = CHUNKS[pair[0]].bytes, CHUNKS[pair[1]].bytes
    return min(
        range(1, blocks),
        key=lambda n: max(-(-units // n) * costs[0], -(-others // (blocks - n)) * costs[1]),
    )


def _units(rows: Sequence[int]) -> int:
    return sum(-(-each // ROWS) for each in rows)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 128) * 128
