"""Collectives of the CUDA backend: which kernel a sum, a message or a set of parts takes.

Small arrays go as packs that are polled for, large ones as pieces behind flags (csrc/group.cuh).
All ranks choose alike, since only shapes and the group decide. Knows neither cupy nor processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Launcher
from voltapile.kernels.cuda.links import (
    MESSAGE,
    PACK_BLOCKS,
    PACK_FLOATS,
    PIECE,
    PIECE_BLOCKS,
    SLOTS,
    TWIN,
    Links,
)
from voltapile.kernels.cuda.rows import LONGEST_HEAD, norm_threads
from voltapile.kernels.ops import Arrival

SUM = Instance("group_packs.cu", "group_sum", waits=True)
SUM_NORM = Instance("group_norm.cu", "group_sum_norm", waits=True)
SUM_SLICES = Instance("group_packs.cu", "group_sum_slices", waits=True)
GATHER = Instance("group_packs.cu", "group_gather", waits=True)
BROADCAST = Instance("group_packs.cu", "group_broadcast", waits=True)
PLAIN, EIGHTS = (("CODE", "Plain"),), (("CODE", "Eights"),)
SUM_PIECES = Instance("group_pieces.cu", "group_sum_pieces", PLAIN, waits=True)
SUM_EIGHTS = Instance("group_pieces.cu", "group_sum_pieces", EIGHTS, waits=True)
SUM_TWINS = Instance("group_pieces.cu", "group_sum_twins", PLAIN, waits=True)
SEND = Instance("group_pieces.cu", "group_send", PLAIN, waits=True)
RECEIVE = Instance("group_pieces.cu", "group_receive", PLAIN, waits=True)
SUM_ROWS = Instance("group_rows.cu", "group_sum_rows", waits=True)
PLACE = Instance("group_alone.cu", "group_place")
ADD = Instance("group_alone.cu", "group_add")
FILL = Instance("group_alone.cu", "group_fill")
CHECK = Instance("group_alone.cu", "group_check")
INSTANCES = [
    *(SUM, SUM_NORM, SUM_SLICES, GATHER, BROADCAST, SUM_PIECES, SUM_EIGHTS, SUM_TWINS),
    *(SUM_ROWS, SEND, RECEIVE, PLACE, ADD, FILL, CHECK),
]

PUSH_BYTES = 640 << 10  # that a rank writes in all, up to which each part goes to everybody
SLICE_BYTES = 1 << 20  # of an array up to which slices go as packs
MOST_PACKS = PACK_BLOCKS * SLOTS  # of one launch
FEWEST_THREADS, FAVOURED_BLOCKS = 64, 64
PIECE_THREADS = 512
LONGEST_NORM = 9 * 1024  # of a row: nine floats for each of a block's threads


def all_reduce(
    ops: Launcher, links: Links, part: DeviceArray | None, out: DeviceArray, accumulate: bool
) -> None:
    """out (+)= the sum over ranks of part."""
    count, adds = out.size, np.int32(accumulate)
    arrays = links.record, 0 if part is None else part.ptr, out.ptr
    if links.islands == 1 and (links.ranks - 1) * out.nbytes <= PUSH_BYTES:
        grid, block = _packs(count)
        ends = adds, np.int32(links.rank), np.int32(links.ranks)
        ops.kernel(SUM)(grid, block, (*arrays, np.int64(0), np.int64(count), *ends))
    elif links.ranks == 2 and out.nbytes > PUSH_BYTES and count % 4 == 0:
        grid = _pieces(count, TWIN, links)
        ops.kernel(SUM_TWINS)(grid, PIECE_THREADS, (*arrays, np.int64(count), adds))
    elif out.nbytes > SLICE_BYTES and count % 4 == 0:
        grid = _pieces(count, links.mates * PIECE, links)
        ops.kernel(SUM_PIECES)(grid, PIECE_THREADS, (*arrays, np.int64(count), adds))
    else:
        step = MOST_PACKS * PACK_FLOATS * links.mates
        for first in range(0, count, step):
            grid, block = _packs(-(-min(step, count - first) // links.mates))
            numbers = np.int64(first), np.int64(count), adds
            ops.kernel(SUM_SLICES)(grid, block, (*arrays, *numbers))


def all_reduce_loosely(
    ops: Launcher, links: Links, part: DeviceArray | None, out: DeviceArray, accumulate: bool
) -> None:
    """all_reduce of rows that need not be exact: 16 bits of each value travel, if it is much."""
    if can_sum_rows(links, out.shape) and accumulate:
        all_reduce_rows(ops, links, part, out)
    elif out.nbytes > SLICE_BYTES and out.size % 8 == 0:
        grid = _pieces(out.size, links.mates * PIECE, links)
        address = 0 if part is None else part.ptr
        numbers = np.int64(out.size), np.int32(accumulate)
        ops.kernel(SUM_EIGHTS)(grid, PIECE_THREADS, (links.record, address, out.ptr, *numbers))
    else:
        all_reduce(ops, links, part, out, accumulate)


def can_sum_rows(links: Links, shape: tuple[int, ...]) -> bool:
    """Whether two ranks may hand each other that many rows, and take their norm along."""
    rows, n = shape
    return links.ranks == 2 and n % 8 == 0 and rows * n * 4 > PUSH_BYTES


def all_reduce_rows(
    ops: Launcher,
    links: Links,
    part: DeviceArray | None,
    x: DeviceArray,
    weight: CudaWeight | None = None,
    eps: float = 0.0,
    out: DeviceArray | None = None,
) -> None:
    """x += the sum of two ranks' parts, as eights; with a weight, out = rms_norm of x."""
    rows, n = x.shape
    assert weight is None or (weight.shape, out and out.shape) == ((n,), x.shape), (weight, x)
    parts = [each.ptr if each else 0 for each in (part, x, weight, out)]
    numbers = np.int32(rows), np.int32(n), np.float32(eps)
    grid = (min(PIECE_BLOCKS, links.blocks, rows),)
    ops.kernel(SUM_ROWS)(grid, PIECE_THREADS, (links.record, *parts, *numbers))


def can_norm(links: Links, shape: tuple[int, ...]) -> bool:
    """Whether a sum of that shape can take the norm of its rows along."""
    rows, n = shape
    fits = n % 4 == 0 and LONGEST_HEAD < n <= LONGEST_NORM and rows * _units(n) <= PACK_BLOCKS
    return fits and links.islands == 1 and (links.ranks - 1) * rows * n * 4 <= PUSH_BYTES


def all_reduce_norm(
    ops: Launcher,
    links: Links,
    part: DeviceArray | None,
    x: DeviceArray,
    weight: CudaWeight,
    eps: float,
    out: DeviceArray,
) -> None:
    """x += the sum over ranks of part; out = rms_norm of x."""
    rows, n = x.shape
    assert (weight.shape, out.shape) == ((n,), x.shape), (weight.shape, out, x)
    address = 0 if part is None else part.ptr
    arrays = links.record, address, x.ptr, weight.ptr, out.ptr
    ranks = np.int32(links.rank), np.int32(links.ranks)
    numbers = np.int32(n), np.float32(eps), np.int32(_units(n))
    ops.kernel(SUM_NORM)((rows,), norm_threads(n), (*arrays, *numbers, *ranks), 4 * n)


def _units(n: int) -> int:
    """So many blocks' packs has a row."""
    return -(-n // (PACK_FLOATS * SLOTS))


def _waits_for_norm(links: Links, late: Late) -> bool:
    if late.is_loose:
        return can_sum_rows(links, late.out.shape)
    return late.exact == len(late.out) and links.norms and can_norm(links, late.out.shape)


def _sum(ops: Launcher, links: Links, late: Late, accumulate: bool) -> None:
    """Exact rows, then the others."""
    exact, rows = late.exact, len(late.out)
    for way, first, end in ((all_reduce, 0, exact), (all_reduce_loosely, exact, rows)):
        if first < end:
            part = None if late.part is None else late.part[first:end]
            way(ops, links, part, late.out[first:end], accumulate)


def all_gather(
    ops: Launcher, links: Links, part: DeviceArray | None, out: DeviceArray, widths: Sequence[int]
) -> None:
    rows, longest = len(out), len(out) * max(widths)
    assert longest < 1 << 31, out
    columns = ops.constant(np.cumsum([0, *widths]).astype(np.int32))
    address = 0 if part is None else part.ptr
    for first, grid, block in _launches(longest):
        numbers = np.int64(first), np.int32(rows)
        ends = columns.ptr, np.int32(links.rank), np.int32(links.ranks)
        ops.kernel(GATHER)(grid, block, (links.record, address, out.ptr, *numbers, *ends))


def broadcast_(ops: Launcher, links: Links, x: DeviceArray, source: int) -> None:
    assert x.dtype.itemsize == 4, x
    for first, grid, block in _launches(x.size):
        numbers = np.int64(first), np.int64(x.size)
        ends = np.int32(source), np.int32(links.rank), np.int32(links.ranks)
        ops.kernel(BROADCAST)(grid, block, (links.record, x.ptr, *numbers, *ends))


def send(ops: Launcher, links: Links, x: DeviceArray, target: int) -> None:
    _pass_on(ops, SEND, links, x, target)


def receive(ops: Launcher, links: Links, x: DeviceArray, source: int) -> None:
    _pass_on(ops, RECEIVE, links, x, source)


def place(ops: Launcher, x: DeviceArray, width: int, offset: int) -> DeviceArray:
    rows, columns = x.shape
    assert 0 <= offset <= offset + columns <= width, (x, width, offset)
    out = ops.scratch((rows, width))
    if rows:
        numbers = np.int32(columns), np.int32(width), np.int32(offset)
        ops.kernel(PLACE)((-(-width // 256), rows), 256, (x.ptr, out.ptr, *numbers))
    return out


def add(ops: Launcher, part: DeviceArray | None, out: DeviceArray, accumulate: bool) -> None:
    """out (+)= part, or zeros."""
    numbers = np.int64(out.size), np.int32(accumulate)
    address = 0 if part is None else part.ptr
    ops.kernel(ADD)((-(-out.size // 256),), 256, (address, out.ptr, *numbers))


def _pass_on(ops: Launcher, kind: Instance, links: Links, x: DeviceArray, other: int) -> None:
    assert x.size % 4 == 0, x
    numbers = np.int64(x.size), np.int32(other)
    ops.kernel(kind)(
        _pieces(x.size, MESSAGE, links), PIECE_THREADS, (links.record, x.ptr, *numbers)
    )


def _launches(count: int) -> list[tuple[int, tuple[int], int]]:
    """(first float, grid, block) of each launch that moves packs of `count` floats."""
    step = MOST_PACKS * PACK_FLOATS
    return [(first, *_packs(min(step, count - first))) for first in range(0, count, step)]


def _packs(count: int) -> tuple[tuple[int], int]:
    """(grid, block) with a thread for each pack of `count` floats: some blocks of few threads."""
    packs = -(-count // PACK_FLOATS)
    threads = FEWEST_THREADS
    while threads < SLOTS and threads * FAVOURED_BLOCKS < packs:
        threads *= 2
    return (-(-packs // threads),), threads


def _pieces(count: int, step: int, links: Links) -> tuple[int]:
    """A block for each `step` floats, if they can all run at once."""
    return (min(PIECE_BLOCKS, links.blocks, -(-count // step)),)


class Watched:
    """An Arrival that tells if the group has failed meanwhile."""

    def __init__(self, arrival: Arrival, links: Links) -> None:
        self._arrival, self._links = arrival, links

    def is_there(self) -> bool:
        return self._arrival.is_there()

    def take(self) -> list[np.ndarray]:
        found = self._arrival.take()
        self._links.check()
        return found


@dataclass(frozen=True)
class Late:
    """A sum that has not been launched. exact: so many first rows."""

    part: DeviceArray | None
    out: DeviceArray
    exact: int

    @property
    def is_loose(self) -> bool:
        return self.exact == 0 < len(self.out)


class CudaCollectives:
    """The part of CudaOps that concerns other ranks; see kernels/group.py. wires.py makes links.

    A sum into the residual stream is not launched at once: if the next thing to be done is the norm
    of the same rows, one kernel does both. Before anything else is submitted comes `_catch_up`.
    """

    _links: Links | None = None
    _late: Late | None = None

    def all_reduce(
        self, part: DeviceArray | None, shape: tuple[int, int], add_to: DeviceArray | None = None
    ) -> DeviceArray:
        assert part is None or part.shape == shape, (part, shape)
        assert add_to is None or add_to.shape == shape, (add_to, shape)
        self._catch_up()
        ops, links = self._launcher(), self._links
        if links is None and part is not None and add_to is None:
            return part
        out = ops.scratch(shape) if add_to is None else add_to
        if links is None:
            add(ops, part, out, add_to is not None)
            return out
        late = Late(part, out, self._exact_rows(shape[0]))
        if add_to is not None and _waits_for_norm(links, late):
            self._late = late
        else:
            _sum(ops, links, late, add_to is not None)
        return out

    def _exact_rows(self, rows: int) -> int:
        """So many first rows of this step have sums that nothing beside them changes."""
        return rows

    def _catch_up(self) -> None:
        """Launch a sum that is late."""
        if self._late is not None:
            assert self._links is not None
            late, self._late = self._late, None
            _sum(self._launcher(), self._links, late, True)

    def _norm_late(self, x: DeviceArray, weight: CudaWeight, eps: float) -> DeviceArray | None:
        """The norm of what a late sum gives, together with it; None if that cannot be."""
        if self._late is None or weight.shape != x.shape[1:]:
            return None
        ops, late = self._launcher(), self._late
        part, total = late.part, late.out
        with ops.scope():
            place = ops.scratch(x.shape)  # where `out` will be; a row's may be another row's part
        is_free = (
            part is None
            or place.ptr >= part.ptr + part.nbytes
            or (place.ptr + place.nbytes <= part.ptr)
        )
        if (total.ptr, total.shape) != (x.ptr, x.shape) or not is_free:
            return None
        assert self._links is not None
        self._late, out = None, ops.scratch(x.shape)
        if late.is_loose:
            all_reduce_rows(ops, self._links, part, x, weight, eps, out)
        else:
            all_reduce_norm(ops, self._links, part, x, weight, eps, out)
        return out

    def all_gather(self, part: DeviceArray | None, rows: int, widths: Sequence[int]) -> DeviceArray:
        if self._links is None:
            assert part is not None, "alone, a rank owns everything"
            return part
        assert len(widths) == self._links.ranks, widths
        out = self._launcher().scratch((rows, sum(widths)))
        all_gather(self._launcher(), self._links, part, out, widths)
        return out

    def broadcast_(self, x: DeviceArray, source: int) -> None:
        if self._links is not None:
            broadcast_(self._launcher(), self._links, x, source)

    def send(self, x: DeviceArray, target: int) -> None:
        assert self._links is not None, "alone"
        send(self._launcher(), self._links, x, target)

    def receive(self, shape: tuple[int, int], source: int) -> DeviceArray:
        assert self._links is not None, "alone"
        out = self._launcher().scratch(shape)
        receive(self._launcher(), self._links, out, source)
        return out

    def place(self, x: DeviceArray, width: int, offset: int) -> DeviceArray:
        return place(self._launcher(), x, width, offset)

    def _watched(self, arrival: Arrival) -> Arrival:
        return arrival if self._links is None else Watched(arrival, self._links)

    def _check_group(self) -> None:
        if self._links is not None:
            self._links.check()

    def _launcher(self) -> Launcher:
        raise NotImplementedError
