"""Launcher of gated delta nets: one kernel a layer for rows of few tokens, three for prompts.

Takes a Launcher and device arrays; knows neither cupy nor models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Launcher
from voltapile.kernels.cuda.spread import spread
from voltapile.kernels.cuda.states import State, make_state, tap_kind
from voltapile.kernels.families import MAX_PROVISIONAL, DeltaShape
from voltapile.kernels.ops import Batch

DIMS = (32, 64, 128)  # of heads
COLUMNS = 32  # of a head that a block of delta_step takes
MAX_TOKENS = 65535  # a grid's limit on its second axis


def _instances(function: str) -> dict[int, Instance]:
    return {
        dim: Instance("delta_net.cu", function, (("DIM", str(dim)),), waits=True) for dim in DIMS
    }


CONV, STEP, END = (_instances(name) for name in ("delta_conv", "delta_step", "delta_end"))
ROW = {dim: Instance("delta_row.cu", "delta_row", (("DIM", str(dim)),), waits=True) for dim in DIMS}
INSTANCES = [*CONV.values(), *STEP.values(), *END.values(), *ROW.values()]
MOST_TAPS = 4  # of a convolution
CONVOLVED = 4  # tokens of a block of delta_conv


@dataclass(frozen=True)
class Parts:
    """DeltaWeights in device memory."""

    conv1d: CudaWeight
    a: CudaWeight
    dt: CudaWeight
    norm: CudaWeight


def delta_state(ops: Launcher, slots: int, shape: DeltaShape) -> State:
    heads, dim = shape.value_heads, shape.dim
    if dim not in DIMS:
        raise ValueError(f"delta nets with heads of {dim}; the cuda backend has {DIMS}")
    if shape.kernel > MOST_TAPS:
        raise ValueError(f"delta nets with {shape.kernel} taps; the cuda backend has {MOST_TAPS}")
    values: list[tuple[int, ...]] = [(shape.kernel - 1, shape.channels), (heads, dim, dim)]
    return make_state(ops, slots, values, [(shape.channels,), (heads,), (heads,)])


def delta_net(
    ops: Launcher,
    inputs: tuple[DeviceArray, DeviceArray, DeviceArray],
    weights: Parts,
    shape: DeltaShape,
    state: State,
    batch: Batch,
    tickets: DeviceArray,
) -> DeviceArray:
    """tickets: uint32 zeros, of all layers."""
    m, z, gates = inputs
    tokens, heads, dim = len(m), shape.value_heads, shape.dim
    assert m.shape == (tokens, shape.channels), (m, shape)
    assert z.shape == (tokens, heads * dim), (z, shape)
    assert gates.shape == (tokens, 2 * heads), (gates, shape)
    assert weights.conv1d.shape == (shape.channels, shape.kernel), weights.conv1d.shape
    assert tokens <= MAX_TOKENS, tokens
    y = ops.scratch((tokens, heads * dim))
    # Rows of generated tokens are short, and so is every row of a step of few tokens.
    is_short = tokens <= MAX_PROVISIONAL or batch.generated >= tokens
    tickets_taken = min(tokens, state.slots) * (shape.key_heads + 1)
    if tokens and is_short and tickets_taken <= len(tickets):
        _rows(ops, inputs, weights, shape, state, batch, tickets, y)
    elif tokens:
        with ops.scope():
            _prompt(ops, inputs, weights, shape, state, batch, y)
    return y


def _rows(
    ops: Launcher,
    inputs: tuple[DeviceArray, DeviceArray, DeviceArray],
    weights: Parts,
    shape: DeltaShape,
    state: State,
    batch: Batch,
    tickets: DeviceArray,
    y: DeviceArray,
) -> None:
    tokens, heads, dim = len(y), shape.value_heads, shape.dim
    (history, matrix), logs = state.values, state.log
    members = np.bincount(shape.key_head_of, minlength=shape.key_heads).astype(np.int32)
    key_heads = ops.constant(np.asarray(shape.key_head_of, np.int32)), ops.constant(members)
    kept = 0 if batch.kept is None else batch.kept.ptr
    flags = int(shape.gate == "sigmoid"), int(batch.is_provisional)
    sizes = tokens, shape.key_heads, heads, shape.kernel, int(tap_kind(weights.conv1d)), *flags
    ops.kernel(ROW[dim])(
        (heads, min(tokens, state.slots)),
        4 * dim,
        (
            *_pointers(*inputs, weights.conv1d, weights.a, weights.dt, weights.norm, *key_heads),
            *_pointers(history, matrix, *logs, state.logged, batch.slots, batch.positions),
            *(kept, tickets.ptr, y.ptr),
            *map(np.int32, sizes),
            np.float32(shape.eps),
        ),
    )


def _prompt(
    ops: Launcher,
    inputs: tuple[DeviceArray, DeviceArray, DeviceArray],
    weights: Parts,
    shape: DeltaShape,
    state: State,
    batch: Batch,
    y: DeviceArray,
) -> None:
    m, z, gates = inputs
    tokens, heads, dim = len(m), shape.value_heads, shape.dim
    (history, matrix), (m_log, b_log, a_log) = state.values, state.log
    c = ops.scratch(m.shape)
    c_log = ops.scratch((state.slots, MAX_PROVISIONAL, shape.channels))
    stands, o = ops.scratch((state.slots,), np.int32), ops.scratch(y.shape)
    slots, logged = batch.slots, state.logged
    kept = 0 if batch.kept is None else batch.kept.ptr
    sizes = tokens, shape.key_heads, heads
    is_provisional, eps = np.int32(batch.is_provisional), np.float32(shape.eps)
    ops.kernel(CONV[dim])(
        (2 * shape.key_heads + heads, -(-tokens // CONVOLVED)),
        dim,
        (
            *_pointers(m, weights.conv1d, history, m_log, logged, slots, batch.positions),
            *(kept, *_pointers(c, c_log, stands)),
            *map(np.int32, (*sizes, shape.kernel)),
            *(tap_kind(weights.conv1d), eps),
        ),
    )
    key_head_of = ops.constant(np.asarray(shape.key_head_of, np.int32))
    rows = min(tokens, state.slots)
    blocks = heads * dim // COLUMNS
    ops.kernel(STEP[dim])(
        (blocks, rows),
        128,
        (
            *_pointers(c, c_log, gates, b_log, a_log, weights.a, weights.dt, key_head_of),
            *_pointers(matrix, stands, slots, o),
            *map(np.int32, sizes),
            is_provisional,
        ),
        shared=spread(ops, blocks, _step_bytes(dim)),
    )
    norms = -(-tokens * heads // 4)
    ops.kernel(END[dim])(
        (norms + rows * -(-shape.channels // 128),),
        128,
        (
            *_pointers(o, weights.norm, z, y, m, gates, history, m_log, b_log, a_log),
            *_pointers(logged, stands, slots),
            *map(np.int32, (*sizes, shape.kernel, shape.gate == "sigmoid")),
            *(eps, np.int32(norms), is_provisional),
        ),
    )


def _step_bytes(dim: int) -> int:
    """Of delta_step's own shared memory: two batches of tokens."""
    return 2 * MAX_PROVISIONAL * (4 * (2 * dim + COLUMNS) + 16)


def _pointers(*arrays: DeviceArray | CudaWeight) -> tuple[int, ...]:
    return tuple(array.ptr for array in arrays)
