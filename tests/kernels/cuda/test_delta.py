"""Delta nets leave no token out, however many rows and heads there are; and are spread evenly."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import delta
from voltapile.kernels.cuda.chunks import max_shared
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance
from voltapile.kernels.cuda.spread import MOST, RESERVED
from voltapile.kernels.cuda.states import State
from voltapile.kernels.families import DeltaShape, DeltaWeights
from voltapile.kernels.ops import Batch
from voltapile.kernels.reference.families import ReferenceFamilyOps
from voltapile.workers.batch import SHORT

from .emulated_families import EmulatedFamilies
from .emulation import has_compiler

REF, DIM = ReferenceFamilyOps(), 32
SLOTS = 20


def batch_of(rows: list[int], first_slot: int = 0, is_counted: bool = True) -> Batch:
    """Rows of so many tokens from position 0 on, as BatchBuffer tells of them."""
    slots = np.repeat(np.arange(first_slot, first_slot + len(rows)), rows).astype(np.int32)
    positions = np.concatenate([np.arange(count) for count in rows]).astype(np.int32)
    short = [end for end, count in zip(np.cumsum(rows), rows, strict=True) if count <= SHORT]
    long_rows = sum(count > SHORT for count in rows) if is_counted else -1
    zeros = np.zeros(len(slots), np.int32)
    fields: Any = {"generated": max(map(int, short), default=0), "long_rows": long_rows}
    return Batch(zeros, slots, positions, positions, zeros, zeros[:0], (), **fields)


SLOW = pytest.mark.slow


@pytest.fixture(scope="module", params=[80, *(pytest.param(n, marks=SLOW) for n in (70, 75))])
def ops(request: pytest.FixtureRequest, folder: Path) -> EmulatedFamilies:
    return EmulatedFamilies(request.param, folder, max_shared(request.param))


# Rows, and whether somebody has counted the long ones among them.
STEPS: list[Any] = [
    ([7], True),
    ([40, 5], True),  # all of it counts as generated, since a short row comes last
    ([8] * 3, False),
    *(
        pytest.param(rows, is_counted, marks=SLOW)
        for rows in (
            *([n] for n in (1, 5, 8, 9, 17, 31, 32, 33, 48)),
            *(
                [9, 1],
                [1, 40],
                [12, 3, *[9] * 5],
                [17, 30, 2, 9],
                [33, 9, 17, 12, 48, 31],  # the first and the fifth have the same block in turn
                [8] * 3,
                [1] * SLOTS,
                [*[3] * 10, 12],
            ),
        )
        for is_counted in (True, False)
    ),
]


@pytest.mark.skipif(not has_compiler(), reason="there is no g++")
@pytest.mark.parametrize(("rows", "is_counted"), STEPS, ids=str)
def test_no_token_is_left_out(ops: Any, rows: list[int], is_counted: bool) -> None:
    heads = 1 + len(rows) % 3
    shape = DeltaShape(1, heads, DIM, 4, (0,) * heads, "silu", 1e-6)
    rng = np.random.default_rng(sum(rows))

    def normal(*sizes: int) -> np.ndarray:
        return rng.standard_normal(sizes, np.float32)

    raw = normal(shape.channels, 4), -np.abs(normal(heads)), normal(heads), normal(DIM)
    mine, theirs = (
        DeltaWeights(*(each.weight(w.reshape(-1).view(np.uint8), "F32", w.shape) for w in raw))
        for each in (ops, REF)
    )
    own, truth = (each.delta_state(SLOTS, shape) for each in (ops, REF))
    for first in (0, SLOTS - len(rows)):
        batch = batch_of(rows, first, is_counted)
        tokens = len(batch.slots)
        inputs = tuple(normal(tokens, n) for n in (shape.channels, heads * DIM, 2 * heads))
        expected = REF.delta_net(inputs, theirs, shape, truth, batch)
        there = Batch(
            **{
                name: ops.array(value) if isinstance(value, np.ndarray) else value
                for name, value in vars(batch).items()
            }
        )
        found = ops.delta_net(tuple(map(ops.array, inputs)), mine, shape, own, there)
        np.testing.assert_allclose(ops.to_host(found), expected, rtol=2e-4, atol=2e-5)
    np.testing.assert_array_equal(ops.to_host(own.values[0]), truth.values[0])
    matrix = ops.to_host(own.values[1]).swapaxes(2, 3)  # ours has a row for each value
    np.testing.assert_allclose(matrix, truth.values[1], rtol=2e-4, atol=2e-5)


@pytest.mark.skipif(not has_compiler(), reason="there is no g++")
@pytest.mark.parametrize("dim", [32, pytest.param(128, marks=SLOW)])
def test_chunks_go_on_from_drafts_that_stand(ops: Any, dim: int) -> None:
    """Decays from none to all, rates from none to all; keys that lie close together."""
    shape = DeltaShape(1, 2, dim, 4, (0, 0), "sigmoid", 1e-6)
    rng = np.random.default_rng(7)
    taps = rng.standard_normal((shape.channels, 4), np.float32)
    raw = taps, np.float32([-8, -0.01]), np.float32([0, 1]), np.ones(dim, np.float32)
    mine, theirs = (
        DeltaWeights(*(each.weight(w.reshape(-1).view(np.uint8), "F32", w.shape) for w in raw))
        for each in (ops, REF)
    )
    own, truth = ops.delta_state(1, shape), REF.delta_state(1, shape)
    none, kept, at = np.zeros(50, np.int32), np.int32([2]), 0
    for count, is_provisional in ((20, False), (5, True), (37, False), (6, True), (16, False)):
        slots, positions = none[:count], np.arange(at, at + count, dtype=np.int32)
        batch = Batch(
            slots, slots, positions, positions, slots, slots[:0], (), kept=kept,
            is_provisional=is_provisional, long_rows=int(count > SHORT),
        )  # fmt: skip
        m = rng.standard_normal((count, shape.channels), np.float32)
        m[:, dim : 2 * dim] = 0.3 * m[:, dim : 2 * dim] + 2
        gates = 6 * rng.standard_normal((count, 4), np.float32)
        inputs = m, rng.standard_normal((count, 2 * dim), np.float32), gates
        expected = REF.delta_net(inputs, theirs, shape, truth, batch)
        there = replace(
            batch, slots=ops.array(slots), positions=ops.array(positions), kept=ops.array(kept)
        )
        found = ops.delta_net(tuple(map(ops.array, inputs)), mine, shape, own, there)
        np.testing.assert_allclose(ops.to_host(found), expected, rtol=2e-4, atol=5e-5)
        at += 2 if is_provisional else count
    matrix = ops.to_host(own.values[1]).swapaxes(2, 3)
    np.testing.assert_allclose(matrix, truth.values[1], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not has_compiler(), reason="there is no g++")
@pytest.mark.parametrize("dim", [32, *(pytest.param(n, marks=SLOW) for n in (64, 128))])
def test_cuts_between_chunks_change_no_bits(ops: Any, dim: int) -> None:
    """A prompt in pieces of whole chunks is the prompt; so is one beside others."""
    shape = DeltaShape(1, 2, dim, 4, (0, 0), "silu", 1e-6)
    rng = np.random.default_rng(dim)
    taps = rng.standard_normal((shape.channels, 4), np.float32)
    raw = taps, np.float32([-2, -0.05]), np.float32([0, 1]), np.ones(dim, np.float32)
    weights = DeltaWeights(*(ops.weight(w.reshape(-1).view(np.uint8), "F32", w.shape) for w in raw))
    inputs = [rng.standard_normal((75, n), np.float32) for n in (shape.channels, 2 * dim, 4)]

    def go_through(pieces: tuple[int, ...], copies: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Outputs and matrix of the last of so many rows alike."""
        state, outputs, at = ops.delta_state(6, shape), [], 0
        for count in pieces:
            batch = batch_of([count] * copies)
            positions = np.tile(np.arange(at, at + count, dtype=np.int32), copies)
            there = replace(batch, slots=ops.array(batch.slots), positions=ops.array(positions))
            own = tuple(ops.array(np.tile(x[at : at + count], (copies, 1))) for x in inputs)
            found = ops.to_host(ops.delta_net(own, weights, shape, state, there))
            outputs.append(found[-count:])
            at += count
        return np.concatenate(outputs), ops.to_host(state.values[1])[copies - 1]

    whole = go_through((75,))
    for pieces, copies in (((16, 48, 11), 1), ((32, 43), 1), ((48, 27), 6)):
        for mine, theirs in zip(go_through(pieces, copies), whole, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@dataclass
class Card:
    """A Launcher that notes what it would launch."""

    multiprocessors: int
    arch: int = 90
    launched: list[tuple[Instance, tuple[int, ...], int]] = field(default_factory=list)

    def kernel(self, instance: Instance) -> Any:
        def call(grid: tuple[int, ...], block: int, args: tuple[Any, ...], shared: int = 0) -> None:
            self.launched.append((instance, grid, shared))

        return call

    def scratch(self, shape: tuple[int, ...], dtype: Any = np.float32) -> DeviceArray:
        return DeviceArray(0, shape, dtype)

    def constant(self, values: np.ndarray) -> DeviceArray:
        return DeviceArray(0, values.shape, values.dtype)

    def scope(self) -> Any:
        return nullcontext()


def launches(card: Card, heads: int, rows: list[int], slots: int) -> None:
    shape = DeltaShape(heads, heads, 128, 4, tuple(range(heads)), "silu", 1e-6)
    tokens = sum(rows)
    weight = SimpleNamespace(shape=(shape.channels, 4), ptr=0, type_name="F32")
    conv: Any = weight
    one = CudaWeight((1,), 4, "F32", 0, 4)
    array = DeviceArray(0, (slots,), np.int32)
    state = State([array, array], [array, array, array], array)
    batch = batch_of(rows)
    there = [
        DeviceArray(0, (tokens, n), np.float32) for n in (shape.channels, heads * 128, 2 * heads)
    ]
    batch.slots = batch.positions = DeviceArray(0, (tokens,), np.int32)
    parts = delta.Parts(conv, one, one, one)
    tickets = DeviceArray(0, (8192,), np.uint32)
    delta.delta_net(card, (there[0], there[1], there[2]), parts, shape, state, batch, tickets)


@pytest.mark.parametrize("multiprocessors", [80, 108, 132, 148])
@pytest.mark.parametrize("heads", [2, 6, 16, 24, 32, 48, 64])
def test_blocks_of_all_long_rows_fit_side_by_side(multiprocessors: int, heads: int) -> None:
    """Shared memory that keeps blocks apart leaves room for those of every long row; and a grid
    has a place for every row."""
    room = max_shared(90) + RESERVED
    for rows in ([200], [200, 9], [1] * 15 + [300], [64] * 3, [100] * 5, [200, 3]):
        card = Card(multiprocessors)
        launches(card, heads, rows, 65)
        grids = {instance.function: (grid, shared) for instance, grid, shared in card.launched}
        (blocks, placed), extra = grids["delta_step"]
        assert placed >= len(rows)
        at_once = sum(count > SHORT for count in rows) * blocks
        own = delta._step_bytes(128)
        side_by_side = room // (own + extra + RESERVED) * multiprocessors
        assert side_by_side >= at_once or at_once > MOST * multiprocessors
        if extra:  # and not for twice as many
            assert (room // (own + extra + RESERVED) - 1) * multiprocessors < at_once


def test_rows_of_few_tokens_have_one_launch() -> None:
    card = Card(132)
    launches(card, 16, [8] * 40, 40)
    assert [(each.function, grid) for each, grid, _ in card.launched] == [("delta_pair", (32, 40))]


def test_more_rows_than_tickets_have_three() -> None:
    card = Card(132)
    launches(card, 63, [1] * 200, 300)
    assert [each.function for each, _, _ in card.launched] == [
        "delta_conv",
        "delta_step",
        "delta_end",
    ]
