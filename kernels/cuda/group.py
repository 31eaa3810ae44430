"""Collectives of the CUDA backend: which kernel a sum, a message or a set of parts takes.

Small arrays go as packs that are polled for, large ones as pieces behind flags (csrc/group.cuh).
All ranks choose alike, since only shapes and the group decide. Knows neither cupy nor processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from voltapile.kernels.cuda import stream
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Launcher
from voltapile.kernels.cuda.links import (
    LONGEST_ROW,
    MESSAGE,
    PACK_BLOCKS,
    PACK_FLOATS,
    PIECE,
    PIECE_BLOCKS,
    SLOTS,
    TAIL_COLUMNS,
    TAIL_RANKS,
    TAIL_ROWS,
    TWIN,
    Links,
)
from voltapile.kernels.cuda.rows import LONGEST_HEAD

SUM = Instance("group_packs.cu", "group_sum", waits=True)
SUM_NORM = Instance("group_norm.cu", "group_sum_norm", waits=True)
TAIL = Instance("group_tail.cu", "group_tail", waits=True)
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
    *(SUM, SUM_NORM, TAIL, SUM_SLICES, GATHER, BROADCAST, SUM_PIECES, SUM_EIGHTS, SUM_TWINS),
    *(SUM_ROWS, SEND, RECEIVE, PLACE, ADD, FILL, CHECK),
]

PUSH_BYTES = 640 << 10  # that a rank writes in all, up to which each part goes to everybody
SLICE_BYTES = 1 << 20  # of an array up to which slices go as packs
MOST_PACKS = PACK_BLOCKS * SLOTS  # of one launch
FEWEST_THREADS, FAVOURED_BLOCKS = 64, 64
PIECE_THREADS = 512
TAIL_BLOCKS, TAIL_THREADS = 64, 128  # of a sum in tails of what lies in memory, at most
RUN = 256  # columns of a warp, where rows are normed: csrc/norm_row.cuh


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
        grid = (min(PIECE_BLOCKS // 2, *_pieces(count, TWIN, links)),)
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
    if can_sum_rows(links, out.shape):
        all_reduce_rows(ops, links, part, out, accumulate)
    elif links.ranks > 2 and out.nbytes > SLICE_BYTES and out.size % 8 == 0:
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
    accumulate: bool = True,
    scales: DeviceArray | None = None,
    bias: CudaWeight | None = None,
    norm: tuple[CudaWeight, float, DeviceArray] | None = None,
) -> None:
    """x (+)= the sum of two ranks' parts, as eights. scales, bias: this rank's part is part [T, D]
    times scales [T], plus bias. norm: weight, eps and out, which is rms_norm of x then."""
    rows, n = x.shape
    weight, eps, out = norm or (None, 0.0, None)
    assert weight is None or (weight.shape, out and out.shape) == ((n,), x.shape), (weight, x)
    assert scales is None or scales.shape == (rows,), scales
    assert bias is None or bias.shape == (n,), bias
    parts = [each.ptr if each else 0 for each in (part, scales, bias, x, weight, out)]
    numbers = np.int32(rows), np.int32(n), np.float32(eps), np.int32(accumulate)
    grid = (min(PIECE_BLOCKS, links.blocks, rows),)
    ops.kernel(SUM_ROWS)(grid, PIECE_THREADS, (links.record, *parts, *numbers))


def can_norm(links: Links, shape: tuple[int, ...]) -> bool:
    """Whether a sum of that shape can take the norm of its rows along."""
    rows, n = shape
    fits = n % 4 == 0 and LONGEST_HEAD < n <= LONGEST_ROW and _goes_by_words(links, rows)
    return fits and (links.ranks - 1) * rows * n * 4 <= PUSH_BYTES


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
    assert (weight.shape, out.shape) == (x.shape[1:], x.shape), (weight.shape, out, x)
    (rows, n), (record, *place) = x.shape, line_of(links)
    arrays = record, 0 if part is None else part.ptr, x.ptr, weight.ptr, out.ptr
    numbers = np.int32(n), np.float32(eps), *place
    ops.kernel(SUM_NORM)((rows,), -(-n // RUN) * 32, (*arrays, *numbers), 8 * n)


def can_tail(links: Links, shape: tuple[int, ...]) -> bool:
    """Whether products can make a sum of that shape in their tail."""
    rows, n = shape
    fits = rows <= stream.TOKENS and n <= TAIL_COLUMNS and n % stream.ROWS == 0
    return fits and _goes_by_words(links, rows)


def _goes_by_words(links: Links, rows: int) -> bool:
    return rows <= TAIL_ROWS and links.islands == 1 and links.ranks <= TAIL_RANKS


def all_reduce_tail(
    ops: Launcher, links: Links, part: DeviceArray | None, out: DeviceArray, accumulate: bool
) -> None:
    """all_reduce beside ranks whose products make the sum in their tail."""
    (tokens, n), (record, *place) = out.shape, line_of(links)
    arrays = record, 0 if part is None else part.ptr, out.ptr
    numbers = np.int32(n), np.int32(tokens), np.int32(accumulate), *place
    blocks = min(TAIL_BLOCKS, -(-out.size // TAIL_THREADS))
    ops.kernel(TAIL)((blocks,), TAIL_THREADS, (*arrays, *numbers))


def line_of(links: Links) -> tuple[int, np.int32, np.int32]:
    """What a kernel is told that sums over all ranks."""
    return links.record, np.int32(links.rank), np.int32(links.ranks)


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
