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

ARCH = 80  # from which on
WARPS, ROWS, TOKENS = 8, 16, 8
# A product norms tokens itself (norms.py) that are so many parts of 256 columns at most. Each block
# reads them twice, past two parts a warp from far away, which a launch for all blocks does once.
NORMED = 64
TEAMS = 2  # of WARPS warps, on a multiprocessor
RESERVED = 1024  # bytes of shared memory that every block takes beside its own
DEPTH = 2  # chunks of a warp that may be on their way at once, if there is room for them
# Places of a ring that are filled before tokens are asked for where a block begins late, which it
# does behind a kernel that holds more registers than are left beside a block.
EARLY, LEFT = 1, 12288
FORMATS = ("Q4_K", "Q5_K", "Q6_K", "Q8_0")
MIXED = [("Q4_K", "Q6_K"), ("Q4_K", "Q5_K"), ("Q5_K", "Q6_K"), ("Q4_K", "Q8_0")]
PAIRS = [*((name, name) for name in FORMATS), *MIXED]
# Threads that a multiprocessor's registers suffice for: a block's own, so up to 128 registers each.
# Fewer leave attention's blocks more room to begin while a product ends, and were slower on an
# H200: an 8B in Q8_0 gave 357 tokens a second with 512 and 340 with 640, in Q4_K_M 396 with 512 and
# 379 with 768, which spills.
THREADS = 512


def _instance(
    pair: tuple[str, str], teams: int, warps: int = WARPS, is_alone: bool = False
) -> Instance:
    defines = {"FORMAT": pair[0], "OTHER": pair[1], "DEPTH": DEPTH, "TEAMS": teams, "WARPS": warps}
    defines |= {"THREADS": THREADS, "TILES": 1, "MANY": 0, "ONE": int(is_alone)}
    named = tuple((key, str(value)) for key, value in defines.items())
    return Instance("matmul_stream.cu", "matmul_stream", named, is_exact=True, waits=True)


# By formats and teams of a block. They share their tokens, and so a format; where there is no room
# for two of one of two formats, blocks have one.
STREAM = {(pair, teams): _instance(pair, teams) for pair in PAIRS for teams in (TEAMS,)}
STREAM |= {(pair, 1): _instance(pair, 1) for pair in MIXED}
# One team of twice as many warps, with a chunk each at most, where there are too few units for two.
BROAD = {(name, name): _instance((name, name), 1, 2 * WARPS) for name in FORMATS}
# Made for one token, what they are made of is a seventh shorter.
ALONE = {each: _instance(*key, is_alone=True) for key, each in STREAM.items()}
ALONE |= {each: _instance(pair, 1, 2 * WARPS, True) for pair, each in BROAD.items()}
# Of a rank's part of a sum, which is made there, too; a block has some bytes more.
_SAME = [STREAM[(name, name), TEAMS] for name in FORMATS] + [*BROAD.values()]
_SAME += [ALONE[each] for each in _SAME]
TAILS = {each: replace(each, defines=(*each.defines, ("TAIL", "1"))) for each in _SAME}
TAIL_BYTES = 256
INSTANCES = [*STREAM.values(), *BROAD.values(), *ALONE.values(), *TAILS.values()]


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

    def turns(self, task: Task) -> int:
        """Chunks that a warp takes one after the other, at most."""
        units = -(-(task.units + task.others) // (self.teams * self.blocks))
        return units * task.tiles * -(-task.columns // (256 * self.warps))

    def instance(self, pair: tuple[str, str], is_tail: bool = False) -> Instance:
        found = STREAM[pair, self.teams] if self.warps == WARPS else BROAD[pair]
        found = ALONE.get(found, found) if self.is_alone else found
        return TAILS[found] if is_tail else found


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
    pair, own, others = task.pair, task.units, task.others
    if pair not in PAIRS or task.tokens > TOKENS or not task.is_whole:
        return None
    if task.is_normed and not _norms(task):
        return None
    for teams in (TEAMS, 1):
        fitting, depth, shared = _room(task, teams)
        memory = depth, shared, task.tokens == 1
        blocks = min(task.multiprocessors * fitting, own + others)
        if (pair, teams) in STREAM and fitting and (blocks > 1 or not others):
            if teams == TEAMS and _is_broad(task):
                return Deal(1, blocks, blocks, *memory, TEAMS * WARPS)
            first = first_other(pair, blocks, -(-own // teams), -(-others // teams))
            return Deal(teams, blocks, first, *memory)
    return None


def _room(task: Task, teams: int) -> tuple[int, int, int]:
    """Blocks on a multiprocessor, and of those that are most the deepest rings; bytes of one."""
    parts, ways = {*task.pair} if task.others else {task.pair[0]}, []
    for depth in range(2, DEPTH + 1):
        shared = max(shared_bytes(CHUNKS[name], teams, depth, task) for name in parts)
        fitting = min(TEAMS // teams, (task.most_shared + RESERVED) // (shared + RESERVED))
        ways.append((fitting, depth, shared))
    return max(ways)


def can_tail(task: Task) -> bool:
    """Whether TAILS has a product's instance, and its blocks room for what that takes."""
    found = deal(task) if task.tokens else None
    room = task.most_shared - TAIL_BYTES
    return found is not None and found.instance(task.pair) in TAILS and found.shared <= room


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
