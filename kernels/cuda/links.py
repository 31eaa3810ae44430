"""Which way each rank writes to each other one, and the record of it that kernels read.

Of a rank's room at another, and of the record, the layout is that of csrc/group.cuh. Knows neither
cupy nor processes: wires.py opens the ways, group.py launches what uses them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from voltapile.kernels.group import GroupError

MOST_RANKS = 16
PACK_BLOCKS, PIECE_BLOCKS = 128, 256  # of a grid, at most
SLOTS, PIECE, TWIN, MESSAGE = 512, 4096, 2048, 2048  # packs, floats of a block
PACK_FLOATS = 3
LONGEST_ROW = 5120  # floats of one that a sum norms
_PACKS, _PIECES = 2 * PACK_BLOCKS * SLOTS * 24, 2 * PIECE_BLOCKS * (PIECE + MESSAGE) * 4
TAIL_RANKS, TAIL_ROWS, TAIL_COLUMNS = 8, 32, 8192  # of a sum by words, most
TAILS_AT = _PACKS + _PIECES
FLAGS_AT = TAILS_AT + 2 * TAIL_ROWS * TAIL_COLUMNS * 4
ROOM = FLAGS_AT + (64 << 10)  # bytes of a rank at each other one

FINE, LATE, ENDED = range(3)  # what a report begins with

_PEER = np.dtype([("out", "<u8"), ("in", "<u8"), ("is_narrow", "<i4"), ("pad", "<i4", 3)])
_COUNTS = ("<u4", (MOST_RANKS, PIECE_BLOCKS))
RECORD = np.dtype(
    [
        ("limit_ticks", "<i8"),
        ("abort", "<u8"),
        ("waits_for", "<u8"),
        ("report", "<u8"),
        ("has_failed", "<u4"),
        ("rank", "<i4"),
        ("ranks", "<i4"),
        ("mates", "<i4"),
        ("mate", "<i4"),
        ("islands", "<i4"),
        ("island", "<i4"),
        ("pad", "<i4"),
        ("mate_ranks", "<i4", MOST_RANKS),
        ("partner_ranks", "<i4", MOST_RANKS),
        ("peers", _PEER, MOST_RANKS),
        ("packs", "<u4", (MOST_RANKS, PACK_BLOCKS)),
        ("pieces", *_COUNTS),
        ("sent", *_COUNTS),
        ("taken", *_COUNTS),
        ("tails", "<u4"),
        ("unused", "<u4"),
    ]
)


@dataclass(frozen=True)
class Way:
    """Between this rank and another: where each one's room at the other lies, for this GPU."""

    out: int
    into: int
    is_narrow: bool  # packs of 8 bytes, since those of 16 may arrive in parts


@dataclass(frozen=True)
class Islands:
    """Ranks that reach each other's memory, all islands of one size; the rest goes by the host."""

    ranks: tuple[tuple[int, ...], ...]

    def of(self, rank: int) -> tuple[int, int]:
        """(island, place in it)"""
        return next((i, each.index(rank)) for i, each in enumerate(self.ranks) if rank in each)


def islands_of(is_direct: np.ndarray) -> Islands:
    """is_direct [ranks, ranks]: whether a pair reaches each other's memory, both ways. One island
    of all where they do not fall into equal ones, or all are alone: then pairs go by the host."""
    ranks = len(is_direct)
    linked = (is_direct & is_direct.T) | np.eye(ranks, dtype=bool)
    found = sorted({tuple(np.flatnonzero(row).tolist()) for row in linked})
    is_partition = sum(map(len, found)) == ranks
    is_worth_it = len(found[0]) > 1 or ranks == 2
    if is_partition and len({len(each) for each in found}) == 1 and is_worth_it:
        return Islands(tuple(found))
    return Islands((tuple(range(ranks)),))


@dataclass(frozen=True)
class Words:
    """Where kernels find the host's words."""

    abort: int
    waits_for: int
    report: int


def record_of(
    rank: int, ways: Sequence[Way], islands: Islands, limit_ticks: int, words: Words
) -> np.ndarray:
    """uint8 bytes of what kernels read of a group. ways: by rank."""
    assert len(ways) <= MOST_RANKS, len(ways)
    assert RECORD.itemsize <= _PACKS, "it lies where a rank's own packs would"
    record = np.zeros(1, RECORD)
    one = record[0]
    one["limit_ticks"] = limit_ticks
    one["abort"], one["waits_for"], one["report"] = words.abort, words.waits_for, words.report
    if len(ways) == 2:  # either adds everything: one step where slices take two
        islands = Islands(((0,), (1,)))
    island, mate = islands.of(rank)
    mates, partners = islands.ranks[island], [each[mate] for each in islands.ranks]
    one["rank"], one["ranks"] = rank, len(ways)
    one["mates"], one["mate"] = len(mates), mate
    one["islands"], one["island"] = len(partners), island
    one["mate_ranks"][: len(mates)] = mates
    one["partner_ranks"][: len(partners)] = partners
    for other, way in enumerate(ways):
        peer = one["peers"][other]
        peer["out"], peer["in"], peer["is_narrow"] = way.out, way.into, way.is_narrow
    return record.view(np.uint8)


class Links:
    """A group as launchers see it. record: the address of its record in device memory. report:
    words in host memory. blocks: that all ranks' GPUs can run at once. owners: what keeps all that
    alive. norms: whether sums take the norm behind them along; tails: whether sums of few rows are
    made in the tail of the products that make their parts; the same on all ranks."""

    def __init__(
        self,
        record: int,
        rank: int,
        ranks: int,
        islands: Islands,
        report: np.ndarray,
        seconds: float = 0.0,
        blocks: int = PIECE_BLOCKS,
        owners: Sequence[object] = (),
    ) -> None:
        self.record, self.rank, self.ranks = record, rank, ranks
        self.islands, self.mates = len(islands.ranks), len(islands.ranks[0]) if ranks > 2 else 1
        self.blocks, self.norms, self.tails = blocks, False, False
        self._report, self._seconds, self._owners = report, seconds, owners

    def check(self) -> None:
        """Raises GroupError if a kernel has given up; after synchronisation."""
        code = ctypes.c_uint32.from_address(self._report.ctypes.data).value
        if code == FINE:
            return
        other = int(self._report[1])
        if code == ENDED:
            raise GroupError(f"the group was ended while rank {self.rank} waited for rank {other}")
        text = f"rank {self.rank} has waited {self._seconds:.1f} s for rank {other}"
        raise GroupError(f"{text}, which has not come")
