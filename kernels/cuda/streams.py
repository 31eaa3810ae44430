"""Launchers of residual streams and n-gram embeddings.

Takes a Launcher and device arrays; knows neither cupy nor models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from voltapile.kernels.cuda.file_table import FileTable, RowReader
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Launcher
from voltapile.kernels.cuda.states import State, make_state, tap_kind
from voltapile.kernels.families import NGramHash
from voltapile.kernels.ops import Batch
from voltapile.shm.formats import format_of


def _mix(function: str) -> Instance:
    return Instance("stream_mix.cu", function, waits=True)


STREAMS, NORM, MIX = _mix("streams"), _mix("stream_norm"), _mix("stream_mix")
ADD, SILU = _mix("stream_add"), _mix("silu_values")
# Rows of a table are short: formats with blocks of 256 values hold none.
TABLES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
ROWS = Instance("ngram.cu", "ngram_rows", waits=True)
GATE, CONV, END = (
    Instance("ngram.cu", name, waits=True) for name in ("ngram_gate", "ngram_conv", "ngram_end")
)
GATHER = {
    name: Instance("ngram_gather.cu", "ngram_gather", (("FORMAT", name),), True, waits=True)
    for name in TABLES
}
INSTANCES = [STREAMS, NORM, MIX, ADD, SILU, ROWS, GATE, CONV, END, *GATHER.values()]

MAX_TOKENS = 65535  # a grid's limit on its second axis
LONGEST = 16 * 1024  # values of a stream


def streams(ops: Launcher, x: DeviceArray, count: int) -> DeviceArray:
    tokens, width = x.shape
    assert tokens * count <= MAX_TOKENS, (x, count)
    out = ops.scratch((tokens, count * width))
    if x.size:
        numbers = np.int32(width), np.int32(count)
        ops.kernel(STREAMS)((_groups(width, 256), tokens * count), 256, (x.ptr, out.ptr, *numbers))
    return out


def stream_norm(
    ops: Launcher,
    x: DeviceArray,
    weight: CudaWeight,
    width: int,
    eps: float,
    before: tuple[DeviceArray, DeviceArray] | None = None,
) -> DeviceArray:
    """before: inject and y, which are added to x first."""
    count = x.shape[1] // width
    assert weight.shape == x.shape[1:] == (count * width,), (x, weight.shape, width)
    assert width % 4 == 0, width
    assert width <= LONGEST, width
    out = ops.scratch(x.shape)
    if x.size:
        added = (0, 0) if before is None else (before[0].ptr, before[1].ptr)
        pointers = x.ptr, *added, weight.ptr, out.ptr
        numbers = np.int32(width), np.int32(count), np.float32(eps)
        threads = 256 if width <= 16 * 256 else 1024
        ops.kernel(NORM)((len(x) * count,), threads, (*pointers, *numbers))
    return out


def stream_mix(
    ops: Launcher,
    x: DeviceArray,
    gate: DeviceArray,
    width: int,
    scales: DeviceArray | None = None,
) -> DeviceArray:
    """scales [T]: what gate is to be multiplied by."""
    assert x.shape == gate.shape, (x, gate)
    assert scales is None or scales.shape == x.shape[:1], (scales, x)
    assert len(x) <= MAX_TOKENS, x
    out = ops.scratch((len(x), width))
    if x.size:
        assert width % 4 == 0, width
        numbers = np.int32(width), np.int32(x.shape[1] // width)
        grid = _groups(width, 4 * 256), len(x)
        factors = 0 if scales is None else scales.ptr
        ops.kernel(MIX)(grid, 256, (x.ptr, gate.ptr, factors, out.ptr, *numbers))
    return out


def stream_add_(ops: Launcher, x: DeviceArray, inject: DeviceArray, y: DeviceArray) -> DeviceArray:
    (tokens, width), count = y.shape, inject.shape[1]
    assert x.shape == (tokens, count * width), (x, inject, y)
    assert tokens <= MAX_TOKENS, x
    if x.size:
        numbers = np.int32(width), np.int32(count)
        grid = _groups(width, 256), tokens
        ops.kernel(ADD)(grid, 256, (x.ptr, inject.ptr, y.ptr, *numbers))
    return x


def silu_(ops: Launcher, x: DeviceArray, scale: float = 1.0) -> DeviceArray:
    if x.size:
        numbers = np.int64(x.size), np.float32(scale)
        ops.kernel(SILU)((_groups(x.size, 256),), 256, (x.ptr, *numbers))
    return x


# --- n-grams --------------------------------------------------------------------------------


def ngram_rows(ops: Launcher, batch: Batch, hashing: NGramHash) -> DeviceArray:
    assert batch.history is not None
    tokens, heads, order = len(batch.slots), len(hashing.moduli), len(hashing.multipliers)
    assert heads % (order - 1) == 0, hashing
    numbers = hashing.multipliers, hashing.moduli, hashing.offsets
    constants = [ops.constant(np.array([n % 2**64 for n in each], np.uint64)) for each in numbers]
    rows = ops.scratch((tokens, heads), np.int64)
    if tokens:
        pointers = batch.slots, batch.positions, batch.history, *constants, rows
        sizes = tokens, batch.history.shape[1], order, heads, hashing.boundary
        ops.kernel(ROWS)(
            (_groups(tokens, 64),), 64, (*(each.ptr for each in pointers), *map(np.int32, sizes))
        )
    return rows


def ngram_gather(ops: RowReader, table: CudaWeight, rows: DeviceArray) -> DeviceArray:
    if table.type_name not in GATHER:
        raise ValueError(f"an n-gram table as {table.type_name}: not in the cuda backend")
    out = ops.scratch((rows.shape[0], rows.shape[1] * table.shape[1]))
    if not rows.size:
        return out
    numbers, found = rows.reshape(rows.size), out.reshape(rows.size, table.shape[1])
    if not isinstance(table, FileTable):
        _gather(ops, table, table.ptr, numbers, found, False)
        return out
    stage = table.stage
    for start in range(0, rows.size, stage.count):
        part = numbers[start : start + stage.count]
        ops.read_rows(table, part)
        read, to = stage.numbers[: len(part)], found[start : start + stage.count]
        _gather(ops, table, stage.data.ptr, read, to, True)
    return out


def _gather(
    ops: Launcher,
    table: CudaWeight,
    data: int,
    numbers: DeviceArray,
    out: DeviceArray,
    is_in_order: bool,
) -> None:
    """out [n, width]. is_in_order: of `numbers` rows, each lies at its number's place."""
    count, width = table.shape
    blocks = width // format_of(table.type_name).block_len
    sizes = np.int64(numbers.size), np.int64(count), np.int32(blocks)
    kinds = np.int32(is_in_order), np.int32(table.is_tiled)
    args = data, numbers.ptr, out.ptr, *sizes, *kinds
    ops.kernel(GATHER[table.type_name])((_groups(numbers.size * blocks, 128),), 128, args)


def ngram_state(ops: Launcher, slots: int, width: int, rows: int) -> State:
    return make_state(ops, slots, [(rows, width)], [(width,)])


@dataclass(frozen=True)
class Parts:
    """NGramWeights in device memory."""

    norm_key: CudaWeight
    norm_query: CudaWeight
    norm_conv: CudaWeight
    conv1d: CudaWeight
    dilation: int


def ngram_add_(
    ops: Launcher,
    x: DeviceArray,
    key: DeviceArray,
    value: DeviceArray,
    weights: Parts,
    state: State,
    batch: Batch,
    eps: float,
) -> DeviceArray:
    (tokens, channels), width = x.shape, value.shape[1]
    count, taps = channels // width, weights.conv1d.shape[1]
    (history,), (log,) = state.values, state.log
    depth = (taps - 1) * weights.dilation
    assert key.shape == x.shape, (x, key)
    assert history.shape[1:] == (depth, channels), (history, depth, channels)
    assert weights.conv1d.shape[0] == channels, weights.conv1d.shape
    assert tokens <= MAX_TOKENS, x
    if not tokens:
        return x
    with ops.scope():
        factors, normed = ops.scratch((tokens, count)), ops.scratch(x.shape)
        stands = ops.scratch((state.slots,), np.int32)
        norms = weights.norm_query, weights.norm_key, weights.norm_conv
        numbers = np.int32(width), np.int32(count), np.float32(eps)
        ops.kernel(GATE)(
            (tokens * count,),
            256,
            (*_pointers(x, key, value, *norms, factors, normed), *numbers),
        )
        kept = 0 if batch.kept is None else batch.kept.ptr
        sizes = tokens, width, count, taps, weights.dilation
        before = history, log, state.logged, batch.slots, batch.positions
        ops.kernel(CONV)(
            (_groups(channels, 128), tokens),
            128,
            (
                *_pointers(x, value, factors, normed, weights.conv1d, *before),
                *(kept, stands.ptr, *map(np.int32, sizes), tap_kind(weights.conv1d)),
            ),
        )
        ends = tokens, channels, depth, int(batch.is_provisional)
        ops.kernel(END)(
            (_groups(channels, 128), min(tokens, state.slots)),
            128,
            (
                *_pointers(normed, history, log, state.logged, stands, batch.slots),
                *map(np.int32, ends),
            ),
        )
    return x


def _pointers(*arrays: DeviceArray | CudaWeight) -> tuple[int, ...]:
    return tuple(array.ptr for array in arrays)


def _groups(items: int, size: int) -> int:
    return -(-items // size)
