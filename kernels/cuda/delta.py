"""Launcher of gated delta nets: one kernel a layer for rows of few tokens, four for prompts.

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
# From sm_90 on: two blocks of a cluster for a head.
PAIR_ARCH, SPLIT = 90, 2
PAIR = {
    dim: Instance(
        "delta_pair.cu", "delta_pair", (("DIM", str(dim)), ("SPLIT", str(SPLIT))), waits=True
    )
    for dim in (64, 128)
}
CHUNK = {
    dim: Instance("delta_chunk.cu", "delta_chunk", (("DIM", str(dim)),), waits=True) for dim in DIMS
}
INSTANCES = [*CONV.values(), *STEP.values(), *END.values(), *ROW.values(), *CHUNK.values()]
INSTANCES += PAIR.values()
CHUNK_COLUMNS = 64  # of a head that a block of delta_chunk takes, or all
CHUNK_HELPERS = 128  # threads of such a block beside two for each column
CHUNK_ROWS = 4  # at once; a recorded step does not tell how many there will be
MOST_TAPS = 4  # of a convolution
CONVOLVED = 4  # tokens of a block of delta_conv


@dataclass(frozen=True)
class Parts:
    """DeltaWeights in device memory."""

    conv1d: CudaWeight
    a: CudaWeight
    dt: CudaWeight
    norm: CudaWeight


@dataclass(frozen=True)
class _Call:
    """What all launches of one layer share."""

    m: DeviceArray
    z: DeviceArray
    gates: DeviceArray
    weights: Parts
    shape: DeltaShape
    state: State
    batch: Batch
    y: DeviceArray

    @property
    def tokens(self) -> int:
        return len(self.y)

    @property
    def most_rows(self) -> int:
        """That there may be."""
        return min(self.tokens, self.state.slots)

    @property
    def is_short(self) -> bool:
        """Whether no row has more tokens than delta_row takes. One that is longer may be among the
        first batch.generated tokens, with a short one behind it."""
        rows = self.batch.long_rows
        return not rows if rows >= 0 else self.tokens <= MAX_PROVISIONAL

    @property
    def kept(self) -> int:
        return 0 if self.batch.kept is None else self.batch.kept.ptr

    @property
    def is_provisional(self) -> int:
        return int(self.batch.is_provisional)

    @property
    def is_sigmoid(self) -> int:
        return int(self.shape.gate == "sigmoid")

    @property
    def tap_kind(self) -> int:
        return int(tap_kind(self.weights.conv1d))


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
    call = _Call(m, z, gates, weights, shape, state, batch, y)
    if tokens and call.is_short and call.most_rows * (shape.key_heads + 1) <= len(tickets):
        _rows(ops, call, tickets)
    elif tokens:
        with ops.scope():
            _prompt(ops, call)
    return y


def _rows(ops: Launcher, call: _Call, tickets: DeviceArray) -> None:
    weights, shape, state, batch = call.weights, call.shape, call.state, call.batch
    (history, matrix), logs = state.values, state.log
    members = np.bincount(shape.key_head_of, minlength=shape.key_heads).astype(np.int32)
    key_heads = ops.constant(np.asarray(shape.key_head_of, np.int32)), ops.constant(members)
    heads = shape.key_heads, shape.value_heads
    sizes = call.tokens, *heads, shape.kernel, call.tap_kind, call.is_sigmoid, call.is_provisional
    is_pair = ops.arch == PAIR_ARCH and shape.dim in PAIR  # it spills on later cards
    each, threads = (SPLIT, shape.dim) if is_pair else (1, 4 * shape.dim)
    ops.kernel((PAIR if is_pair else ROW)[shape.dim])(
        (each * shape.value_heads, call.most_rows),
        threads,
        (
            *_pointers(call.m, call.z, call.gates, weights.conv1d, weights.a, weights.dt),
            *_pointers(weights.norm, *key_heads, history, matrix, *logs, state.logged),
            *_pointers(batch.slots, batch.positions),
            *(call.kept, tickets.ptr, call.y.ptr),
            *map(np.int32, sizes),
            np.float32(shape.eps),
        ),
        shared=_pair_bytes(shape.dim) if is_pair else 0,
    )


def _pair_bytes(dim: int) -> int:
    """Of csrc/delta_pair.cu's Shared."""
    half, batch = dim // 2, MAX_PROVISIONAL
    floats = half * dim + batch * (2 * dim + half + 4) + batch * dim + 9 * dim + 4 * (dim // 32)
    return -(-(4 * floats + 24) // 16) * 16


def _prompt(ops: Launcher, call: _Call) -> None:
    channels, slots = call.shape.channels, call.state.slots
    c, o = ops.scratch(call.m.shape), ops.scratch(call.y.shape)
    c_log = ops.scratch((slots, MAX_PROVISIONAL, channels))
    stands = ops.scratch((slots,), np.int32)
    _convolve(ops, call, c, c_log, stands)
    _step(ops, call, (c, c_log), stands, o)
    if call.batch.long_rows != 0:
        _chunks(ops, call, c, o)
    _end(ops, call, o, stands)


def _convolve(
    ops: Launcher, call: _Call, c: DeviceArray, c_log: DeviceArray, stands: DeviceArray
) -> None:
    shape, state, batch = call.shape, call.state, call.batch
    before = call.m, call.weights.conv1d, state.values[0], state.log[0], state.logged
    heads = shape.key_heads, shape.value_heads
    ops.kernel(CONV[shape.dim])(
        (2 * shape.key_heads + shape.value_heads, -(-call.tokens // CONVOLVED)),
        shape.dim,
        (
            *_pointers(*before, batch.slots, batch.positions),
            *(call.kept, *_pointers(c, c_log, stands)),
            *map(np.int32, (call.tokens, *heads, shape.kernel, call.tap_kind)),
            np.float32(shape.eps),
        ),
    )


def _step(
    ops: Launcher,
    call: _Call,
    convolved: tuple[DeviceArray, DeviceArray],
    stands: DeviceArray,
    o: DeviceArray,
) -> None:
    shape, weights = call.shape, call.weights
    key_head_of = ops.constant(np.asarray(shape.key_head_of, np.int32))
    blocks = shape.value_heads * shape.dim // COLUMNS
    logs, gates = call.state.log[1:], (weights.a, weights.dt, key_head_of)
    long_rows = max(1, call.batch.long_rows)  # short ones are done in no time
    ops.kernel(STEP[shape.dim])(
        (blocks, call.most_rows),
        128,
        (
            *_pointers(*convolved, call.gates, *logs, *gates),
            *_pointers(call.state.values[1], stands, call.batch.slots, o),
            *map(np.int32, (call.tokens, shape.key_heads, shape.value_heads, call.is_provisional)),
            np.int32(MAX_PROVISIONAL),
        ),
        shared=spread(ops, blocks * long_rows, _step_bytes(shape.dim)),
    )


def _chunks(ops: Launcher, call: _Call, c: DeviceArray, o: DeviceArray) -> None:
    """Rows that _step has left out."""
    shape, weights = call.shape, call.weights
    columns = min(shape.dim, CHUNK_COLUMNS)
    rows = min(call.most_rows, call.tokens // (MAX_PROVISIONAL + 1), CHUNK_ROWS)
    if rows == 0:
        return
    key_head_of = ops.constant(np.asarray(shape.key_head_of, np.int32))
    sizes = call.tokens, shape.key_heads, shape.value_heads, call.is_provisional, MAX_PROVISIONAL
    ops.kernel(CHUNK[shape.dim])(
        (shape.value_heads * shape.dim // columns, rows),
        2 * columns + CHUNK_HELPERS,
        (
            *_pointers(c, call.gates, weights.a, weights.dt, key_head_of),
            *_pointers(call.state.values[1], call.batch.slots, o),
            *map(np.int32, sizes),
        ),
    )


def _end(ops: Launcher, call: _Call, o: DeviceArray, stands: DeviceArray) -> None:
    shape, state = call.shape, call.state
    norms = -(-call.tokens * shape.value_heads // 4)
    heads = shape.key_heads, shape.value_heads
    ops.kernel(END[shape.dim])(
        (norms + call.most_rows * -(-shape.channels // 128),),
        128,
        (
            *_pointers(o, call.weights.norm, call.z, call.y, call.m, call.gates, state.values[0]),
            *_pointers(*state.log, state.logged, stands, call.batch.slots),
            *map(np.int32, (call.tokens, *heads, shape.kernel, call.is_sigmoid)),
            *(np.float32(shape.eps), np.int32(norms), np.int32(call.is_provisional)),
        ),
    )


def _step_bytes(dim: int) -> int:
    """Of delta_step's own shared memory: two batches of tokens."""
    return 2 * MAX_PROVISIONAL * (4 * (2 * dim + COLUMNS) + 16)


def _pointers(*arrays: DeviceArray | CudaWeight) -> tuple[int, ...]:
    return tuple(array.ptr for array in arrays)
