"""The C++ ops of kernels/families.py against the numpy ones: sizes, states, company, replays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gguf
import numpy as np
import pytest
from voltapile.kernels.cpu import _cpu
from voltapile.kernels.cpu.families import CpuFamilyOps
from voltapile.kernels.families import (
    INDEX_RING,
    DeltaShape,
    DeltaWeights,
    NGramHash,
    NGramWeights,
    ngram_numbers,
)
from voltapile.kernels.ops import Array, Batch
from voltapile.kernels.reference.families import ReferenceFamilyOps

BEST = _cpu.isa()
REFERENCE = ReferenceFamilyOps()


@pytest.fixture(params=["plain", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        _cpu.set_isa(request.param)
    except ValueError as missing:
        pytest.skip(str(missing))
    yield request.param
    _cpu.set_isa(BEST)


def make_ops(threads: int = 2) -> CpuFamilyOps:
    return CpuFamilyOps(threads, 1 << 26)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def weight(ops: Any, values: np.ndarray, kind: str = "F32") -> Any:
    packed = values
    if kind != "F32":
        packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return ops.weight(packed.view(np.uint8).reshape(-1), kind, values.shape)


def ints(values: Sequence[int]) -> Array:
    return np.array(values, np.int32)


def batch_of(rows: Sequence[tuple[int, int, int]], **fields: Any) -> Batch:
    """rows: slot, first position and number of tokens of each."""
    slots = [slot for slot, _, count in rows for _ in range(count)]
    positions = [start + i for _, start, count in rows for i in range(count)]
    n = len(slots)
    values = {"tokens": ints([0] * n), "pages": (), **fields}
    return Batch(
        slots=ints(slots),
        positions=ints(positions),
        rope_positions=ints(positions),
        continues=ints([0] * n),
        outputs=ints(range(n)),
        **values,
    )


def close(ours: np.ndarray, theirs: np.ndarray, tolerance: float = 3e-6) -> None:
    most = max(1e-6, float(np.abs(theirs).max()))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * most)


# --- experts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "count", "used"), [(1, 8, 2), (5, 128, 8), (70, 33, 10)])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_route(isa: str, tokens: int, count: int, used: int, is_rounded: bool) -> None:
    x, router = normal(0, tokens, 96), normal(1, count, 96)
    batch = replace(batch_of([(0, 0, tokens)]), generated=tokens // 2)
    found = []
    for ops in (make_ops(), REFERENCE):
        counts = np.zeros((2, count), np.int64)
        found.append((*ops.route(x, weight(ops, router), used, counts, batch, is_rounded), counts))
    ours, theirs = found
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4)
    np.testing.assert_array_equal(ours[2], theirs[2])
    assert ours[2].sum(axis=1).tolist() == [
        (tokens - tokens // 2) * used,
        tokens // 2 * used,
    ]


def test_equal_logits_choose_the_first_and_nan_says_so() -> None:
    ops, counts = make_ops(), np.zeros((2, 6), np.int64)
    x = np.array([[1.0], [np.nan]], np.float32)
    router = np.array([[0], [2], [2], [1], [2], [2]], np.float32)
    chosen, weights = ops.route(x, weight(ops, router), 3, counts, batch_of([(0, 0, 2)]))
    assert chosen[0].tolist() == [1, 2, 4]
    np.testing.assert_allclose(weights[0], 1 / 3, rtol=1e-6)
    assert np.isnan(weights[1]).all()
    x.view(np.uint32)[1] = 0x7FFFFFFF  # a NaN that rounding would carry into the sign
    _, weights = ops.route(x, weight(ops, router), 3, counts, batch_of([(0, 0, 2)]), True)
    assert np.isnan(weights[1]).all()
    assert (chosen[1] >= 0).all()
    assert (chosen[1] < 6).all()


@dataclass
class Layer:
    """Routed experts, and a random choice of them for each token."""

    x: Array
    routing: tuple[Array, Array]
    matrices: list[Array]
    kinds: tuple[str, str, str]

    def table(self, ops: Any, first: int = 0, stop: int | None = None) -> Any:
        parts = [each[first:stop] for each in self.matrices]
        weights = [weight(ops, *each) for each in zip(parts, self.kinds, strict=True)]
        return ops.expert_table(*weights, first)


def layer_of(
    tokens: int, count: int, used: int, width: int, ffn: int, kinds: tuple[str, str, str]
) -> Layer:
    rng = np.random.default_rng(tokens)
    chosen = np.stack([rng.permutation(count)[:used] for _ in range(tokens)]).astype(np.int32)
    shares = rng.random((tokens, used), np.float32)
    matrices = [normal(1, count, ffn, width), normal(2, count, ffn, width)]
    matrices.append(normal(3, count, width, ffn))
    return Layer(normal(0, tokens, width), (chosen, shares), matrices, kinds)


EXPERTS = [
    (1, 8, 2, 64, 32, "Q8_0"),
    (3, 8, 4, 96, 64, "Q4_0"),
    (8, 5, 5, 64, 96, "Q5_1"),
    (9, 4, 2, 64, 32, "Q8_0"),
    (130, 6, 3, 96, 160, "Q8_0"),
    (40, 3, 2, 48, 40, "F32"),
    (7, 16, 4, 48, 24, "F32"),
]


@pytest.mark.parametrize(("tokens", "count", "used", "width", "ffn", "kind"), EXPERTS)
def test_experts(
    isa: str, tokens: int, count: int, used: int, width: int, ffn: int, kind: str
) -> None:
    layer = layer_of(tokens, count, used, width, ffn, (kind, kind, kind))
    ops = make_ops()
    theirs = REFERENCE.experts(layer.x, layer.routing, layer.table(REFERENCE))
    ours = ops.experts(layer.x, layer.routing, layer.table(ops))
    close(ours, theirs, 3e-6 if kind == "F32" else 2e-4)
    residual = normal(9, tokens, width)
    expected = residual + ours
    assert ops.experts(layer.x, layer.routing, layer.table(ops), residual) is residual
    np.testing.assert_array_equal(residual, expected)


@pytest.mark.parametrize("kinds", [("Q8_0", "Q4_0", "F16"), ("F16", "F32", "Q5_0")])
@pytest.mark.parametrize("tokens", [4, 60])
def test_experts_of_mixed_formats(tokens: int, kinds: tuple[str, str, str]) -> None:
    layer, ops = layer_of(tokens, 6, 3, 64, 64, kinds), make_ops()
    theirs = REFERENCE.experts(layer.x, layer.routing, layer.table(REFERENCE))
    close(ops.experts(layer.x, layer.routing, layer.table(ops)), theirs, 2e-4)


@pytest.mark.parametrize("tokens", [1, 6, 20])
def test_experts_have_the_bits_of_single_products(isa: str, tokens: int) -> None:
    layer, ops = layer_of(tokens, 5, 3, 96, 64, ("Q8_0", "Q8_0", "Q4_0")), make_ops()
    ours = ops.experts(layer.x, layer.routing, layer.table(ops))
    kinds = layer.kinds
    experts = [
        [weight(ops, *one) for one in zip(matrices, kinds, strict=True)]
        for matrices in zip(*layer.matrices, strict=True)
    ]
    for t, (chosen, shares) in enumerate(zip(*layer.routing, strict=True)):
        total = np.zeros(96, np.float32)
        for expert, share in zip(chosen, shares, strict=True):
            gate, up, down = experts[expert]
            total += share * ops.linear(ops.glu(layer.x[t : t + 1], gate, up, "silu"), down)[0]
        np.testing.assert_array_equal(ours[t], total)


@pytest.mark.parametrize("tokens", [2, 30])
def test_experts_of_several_ranks_add_up(tokens: int) -> None:
    """A table has some of the experts; the last one here has so few that a token finds none."""
    layer, ops = layer_of(tokens, 7, 3, 64, 32, ("Q8_0",) * 3), make_ops()
    whole = ops.experts(layer.x, layer.routing, layer.table(ops))
    parts = [
        ops.experts(layer.x, layer.routing, layer.table(ops, first, stop))
        for first, stop in ((0, 4), (4, 6), (6, 7))
    ]
    chosen = layer.routing[0]
    assert (parts[2][~(chosen == 6).any(axis=1)] == 0).all()
    close(sum(parts), whole, 1e-6)


@pytest.mark.parametrize("kind", ["Q8_0", "F32"])
def test_a_token_among_experts_does_not_depend_on_company(isa: str, kind: str) -> None:
    layer = layer_of(40, 4, 2, 96, 64, (kind,) * 3)
    answers = []
    for threads in (1, 2, 3):
        ops = make_ops(threads)
        answers.append(ops.experts(layer.x, layer.routing, layer.table(ops)))
    for other in answers[1:]:
        np.testing.assert_array_equal(other, answers[0])
    for n in range(1, 9):  # few tokens and many take different ways
        ops = make_ops(2)
        first = 5
        x, routing = layer.x[first : first + n], [e[first : first + n] for e in layer.routing]
        some = ops.experts(x.copy(), tuple(e.copy() for e in routing), layer.table(ops))
        np.testing.assert_array_equal(some, answers[0][first : first + n])


@pytest.mark.parametrize("shape", [(1, 7), (5, 64), (3, 130)])
def test_gates(isa: str, shape: tuple[int, int]) -> None:
    y, gate, x = normal(0, *shape), normal(1, *shape) * 5, normal(2, shape[0], 48)
    row = normal(3, 48)
    for values in (row, row[None]):  # files have it as a vector or as a matrix of one row
        ops = make_ops()
        ours = ops.gate_rows_(y.copy(), x, weight(ops, values))
        close(ours, REFERENCE.gate_rows_(y.copy(), x, weight(REFERENCE, values)))
    close(make_ops().gate_(y.copy(), gate), REFERENCE.gate_(y.copy(), gate))
    close(make_ops().silu_(y.copy(), 0.25), REFERENCE.silu_(y.copy(), 0.25))


def test_gates_hand_on_nan_and_saturate() -> None:
    gate = np.array([[-1e4, 1e4, np.nan, 0]], np.float32)
    ours = make_ops().gate_(np.ones((1, 4), np.float32), gate)
    np.testing.assert_allclose(ours, [[0, 1, np.nan, 0.5]], atol=1e-30)


@pytest.mark.parametrize(("heads", "dim"), [(1, 5), (6, 64), (3, 16)])
def test_split_heads(heads: int, dim: int) -> None:
    x = normal(0, 4, heads * 2 * dim)
    ours, theirs = make_ops().split_heads(x, dim), REFERENCE.split_heads(x, dim)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, other)


# --- delta nets ---------------------------------------------------------------------------------

SLOTS = 4
SHAPES = [
    DeltaShape(2, 6, 64, 4, (0, 1, 0, 1, 0, 1), "silu", 1e-6),
    DeltaShape(1, 3, 128, 4, (0, 0, 0), "sigmoid", 1e-6),
    DeltaShape(2, 2, 20, 3, (1, 0), "silu", 1e-5),
]


class DeltaLayer:
    """The same layer and its states in both backends."""

    def __init__(self, shape: DeltaShape, threads: int = 2) -> None:
        self.shape, self.both = shape, (make_ops(threads), REFERENCE)
        values = {
            "conv1d": normal(1, shape.channels, shape.kernel) * 0.5,
            "a": -np.exp(normal(2, shape.value_heads)),
            "dt": normal(3, shape.value_heads),
            "norm": normal(4, shape.dim),
        }
        self.weights = [
            DeltaWeights(**{name: weight(ops, each) for name, each in values.items()})
            for ops in self.both
        ]
        self.states = [ops.delta_state(SLOTS, shape) for ops in self.both]

    def inputs(self, batch: Batch) -> tuple[Array, Array, Array]:
        """A function of slot and position alone."""
        shape, width = self.shape, self.shape.value_heads * self.shape.dim
        widths = shape.channels, width, 2 * shape.value_heads
        keys = [1000 * s + p for s, p in zip(batch.slots, batch.positions, strict=True)]
        return tuple(
            np.stack([normal(10_000 * i + key, n) for key in keys]) for i, n in enumerate(widths)
        )

    def __call__(self, batch: Batch) -> Array:
        """What the CPU answers, which is what the reference answers."""
        answers = [
            ops.delta_net(self.inputs(batch), weights, self.shape, state, batch)
            for ops, weights, state in zip(self.both, self.weights, self.states, strict=True)
        ]
        close(answers[0], answers[1], 2e-5)
        return answers[0].copy()


@pytest.mark.parametrize("shape", SHAPES)
def test_delta_net(isa: str, shape: DeltaShape) -> None:
    layer = DeltaLayer(shape)
    layer(batch_of([(1, 0, 70), (0, 0, 1), (3, 0, 2)]))
    layer(batch_of([(0, 1, 1), (3, 2, 1), (1, 70, 1)]))
    layer(batch_of([(2, 0, 5), (1, 71, 9)]))
    layer(batch_of([(1, 0, 3), (3, 3, 1)]))  # another request in a used slot


@pytest.mark.parametrize("kept", [None, *range(7)])
def test_a_provisional_step_of_a_delta_net(kept: int | None) -> None:
    """After drafts, bits are those of the tokens that stand, computed one by one."""
    layer, plain = DeltaLayer(SHAPES[0]), DeltaLayer(SHAPES[0])
    layer(batch_of([(0, 0, 10), (2, 0, 3)]))
    plain(batch_of([(0, 0, 10), (2, 0, 3)]))
    drafted = layer(batch_of([(0, 10, 6), (2, 3, 1)], is_provisional=True))
    stands = 6 if kept is None else kept
    single = [plain(batch_of([(0, 10 + i, 1)])) for i in range(stands)]
    for i, each in enumerate(single):
        np.testing.assert_array_equal(drafted[i], each[0])
    kept_of = None if kept is None else ints([kept, 0, 1, 0])
    plain(batch_of([(2, 3, 1)]))
    rows = [(0, 10 + stands, 2), (2, 4, 1)]
    after = layer(batch_of(rows, kept=kept_of, is_provisional=True))
    np.testing.assert_array_equal(after, plain(batch_of(rows)))
    # Once more, without a draft after it: the log of the second step stands.
    rows = [(0, 12 + stands, 1), (2, 5, 1)]
    np.testing.assert_array_equal(layer(batch_of(rows)), plain(batch_of(rows)))


def test_a_delta_net_does_not_depend_on_threads_chunks_and_company() -> None:
    rows = [(0, 0, 150), (1, 0, 4)]
    answers = [DeltaLayer(SHAPES[1], threads)(batch_of(rows)) for threads in (1, 2, 5)]
    for other in answers[1:]:
        np.testing.assert_array_equal(other, answers[0])
    layer = DeltaLayer(SHAPES[1])
    for start, count in ((0, 64), (64, 1), (65, 63), (128, 22)):
        part = layer(batch_of([(0, start, count)]))
        np.testing.assert_array_equal(part, answers[0][start : start + count])


def test_padding_rows_of_a_delta_net() -> None:
    """They share a slot and harm no other."""
    layer, alone = DeltaLayer(SHAPES[0]), DeltaLayer(SHAPES[0])
    layer(batch_of([(0, 0, 5)]))
    alone(batch_of([(0, 0, 5)]))
    for position in range(5, 9):
        padded = batch_of([(0, position, 1), (3, 7, 1), (3, 7, 1), (3, 7, 1)])
        single = alone(batch_of([(0, position, 1)]))
        np.testing.assert_array_equal(layer(padded)[:1], single)


def test_states_are_saved_and_restored() -> None:
    layer = DeltaLayer(SHAPES[0])
    layer(batch_of([(1, 0, 12), (0, 0, 3)]))
    layer(batch_of([(1, 12, 3)], is_provisional=True))
    ops, states = layer.both[0], [layer.states[0]]
    saved = np.zeros(ops.state_bytes(states[0]), np.uint8)
    ops.save_states(states, 1, saved)
    theirs = np.zeros(REFERENCE.state_bytes(layer.states[1]), np.uint8)
    REFERENCE.save_states([layer.states[1]], 1, theirs)
    assert saved.nbytes == theirs.nbytes
    rest = batch_of([(1, 15, 4)], kept=ints([0, 3, 0, 0]))
    first = layer(rest)
    layer(batch_of([(2, 0, 5), (1, 0, 7)]))  # somebody else
    ops.restore_states(states, 1, saved)
    REFERENCE.restore_states([layer.states[1]], 1, theirs)
    np.testing.assert_array_equal(layer(rest), first)
    ops.restore_states(states, 3, saved)
    REFERENCE.restore_states([layer.states[1]], 3, theirs)
    elsewhere = batch_of([(3, 15, 4)], kept=ints([0, 0, 0, 3]))
    inputs = layer.inputs(rest)
    moved = ops.delta_net(inputs, layer.weights[0], layer.shape, layer.states[0], elsewhere)
    np.testing.assert_array_equal(moved, first)


def test_what_varies_is_read_when_a_recorded_delta_net_runs() -> None:
    layer = DeltaLayer(SHAPES[0])
    ops, state = layer.both[0], layer.states[0]
    kept = ints([0, 0, 0, 0])
    batch = batch_of([(0, 0, 2), (1, 0, 1)], kept=kept)
    inputs = layer.inputs(batch)
    with ops.capture() as graph:
        out = ops.delta_net(inputs, layer.weights[0], layer.shape, state, batch)
    assert not state.history.any()
    graph.replay()
    theirs = REFERENCE.delta_net(inputs, layer.weights[1], layer.shape, layer.states[1], batch)
    close(out, theirs, 2e-5)
    batch.slots[:], batch.positions[:] = [1, 1, 2], [1, 2, 0]
    for own, new in zip(inputs, layer.inputs(batch), strict=True):
        own[...] = new
    graph.replay()
    theirs = REFERENCE.delta_net(inputs, layer.weights[1], layer.shape, layer.states[1], batch)
    close(out, theirs, 2e-5)


# --- residual streams and n-grams ---------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "count", "width"), [(1, 4, 64), (3, 2, 20), (9, 4, 130)])
def test_streams(isa: str, tokens: int, count: int, width: int) -> None:
    x, many = normal(0, tokens, width), normal(1, tokens, count * width)
    gate, factors = normal(2, tokens, count * width), normal(3, count * width)
    inject = normal(4, tokens, count) * 3
    ops = make_ops()
    np.testing.assert_array_equal(ops.streams(x, count), REFERENCE.streams(x, count))
    close(ops.stream_mix(many, gate, width), REFERENCE.stream_mix(many, gate, width))
    added = [each.stream_add_(many.copy(), inject, x) for each in (ops, REFERENCE)]
    close(*added)
    for values in (factors, factors.reshape(count, width)):  # files have either
        normed = [
            each.stream_norm(many, weight(each, values), width, 1e-6) for each in (ops, REFERENCE)
        ]
        close(*normed)


HASHING = NGramHash(
    multipliers=(13006599363006345, 9858038476582405, 7992708450047399),
    moduli=(97, 101, 103, 107),
    offsets=(0, 97, 198, 301),
    boundary=7,
)


def test_rows_of_ngrams() -> None:
    rng = np.random.default_rng(0)
    history = rng.integers(0, 9, (SLOTS, 40)).astype(np.int32)  # the boundary is among them
    rows = [(0, 0, 1), (1, 0, 40), (2, 17, 5), (3, 1, 2)]
    batch = batch_of(rows, history=history)
    ours = make_ops().ngram_rows(batch, HASHING)
    np.testing.assert_array_equal(ours, REFERENCE.ngram_rows(batch, HASHING))
    assert ours.dtype == np.int64
    past = batch_of([(0, 40, 1)], history=history)  # a finished slot may go past the end
    assert (make_ops().ngram_rows(past, HASHING) >= 0).all()


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 40])
def test_rows_of_a_run_are_known_without_what_comes_before(tokens: int) -> None:
    """All but those of its first tokens."""
    history = np.random.default_rng(1).integers(0, 9, (SLOTS, 40)).astype(np.int32)
    batch = batch_of([(1, 0, 40)], history=history)
    whole = REFERENCE.ngram_rows(batch, HASHING)[40 - tokens :]
    found = ngram_numbers(history[1, 40 - tokens :], HASHING)
    assert found.dtype == np.int64
    assert found.shape == (max(0, tokens - 2), 4)
    np.testing.assert_array_equal(found, whole[2:])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
def test_rows_are_gathered(kind: str) -> None:
    values, rows = normal(0, 50, 32), np.array([[3, 49, 3], [0, 7, 20]], np.int64)
    ours, theirs = (
        ops.ngram_gather(
            weight(ops, values.astype(np.float16) if kind == "F16" else values, kind), rows
        )
        for ops in (make_ops(), REFERENCE)
    )
    np.testing.assert_array_equal(ours, theirs)


class NGramLayer:
    """The same layer and its states in both backends."""

    def __init__(self, count: int, width: int, threads: int = 2) -> None:
        self.all, self.width, self.both = count * width, width, (make_ops(threads), REFERENCE)
        names = "norm_key", "norm_query", "norm_conv"
        values = {name: normal(i, self.all) for i, name in enumerate(names)}
        values["conv1d"] = normal(5, self.all, 4)
        self.weights = [
            NGramWeights(dilation=3, **{name: weight(ops, each) for name, each in values.items()})
            for ops in self.both
        ]
        self.states = [ops.ngram_state(SLOTS, self.all, 9) for ops in self.both]

    def __call__(self, batch: Batch) -> Array:
        keys = [1000 * s + p for s, p in zip(batch.slots, batch.positions, strict=True)]
        x, key, value = (
            np.stack([normal(10_000 * i + key, n) for key in keys])
            for i, n in enumerate((self.all, self.all, self.width))
        )
        answers = [
            ops.ngram_add_(x.copy(), key, value, weights, state, batch, 1e-6)
            for ops, weights, state in zip(self.both, self.weights, self.states, strict=True)
        ]
        close(answers[0], answers[1], 1e-5)
        return answers[0]


@pytest.mark.parametrize(("count", "width"), [(4, 64), (2, 20)])
def test_ngrams_are_added(isa: str, count: int, width: int) -> None:
    layer = NGramLayer(count, width)
    layer(batch_of([(1, 0, 30), (0, 0, 1), (3, 0, 2)]))
    layer(batch_of([(0, 1, 1), (3, 2, 1), (1, 30, 1)]))
    layer(batch_of([(2, 0, 5), (1, 31, 12)]))
    layer(batch_of([(1, 0, 3), (3, 3, 1)]))


@pytest.mark.parametrize("kept", [None, *range(9)])
def test_a_provisional_step_of_ngrams(kept: int | None) -> None:
    layer, plain = NGramLayer(4, 32), NGramLayer(4, 32, threads=1)
    layer(batch_of([(0, 0, 4)]))
    plain(batch_of([(0, 0, 4)]))
    drafted = layer(batch_of([(0, 4, 8)], is_provisional=True))
    stands = 8 if kept is None else kept
    for i in range(stands):
        np.testing.assert_array_equal(plain(batch_of([(0, 4 + i, 1)]))[0], drafted[i])
    kept_of = None if kept is None else ints([kept, 0, 0, 0])
    rows = [(0, 4 + stands, 2)]
    after = layer(batch_of(rows, kept=kept_of, is_provisional=True))
    np.testing.assert_array_equal(after, plain(batch_of(rows)))
    rows = [(0, 6 + stands, 3)]
    np.testing.assert_array_equal(layer(batch_of(rows)), plain(batch_of(rows)))


# --- attention to chosen blocks -----------------------------------------------------------------

PAGE, PAGES = 32, 24


class SparseLayer:
    """An index and a cache of keys and values in both backends, filled alike."""

    def __init__(self, block: int, top_k: int, heads: int = 4, threads: int = 2) -> None:
        self.both, self.block, self.top_k = (make_ops(threads), REFERENCE), block, top_k
        self.head_map, self.dim, self.index_heads = [0] * (heads // 2) + [1] * (heads // 2), 40, 3
        rng = np.random.default_rng(1)
        self.table = rng.permutation(PAGES)[: SLOTS * 5].reshape(SLOTS, 5).astype(np.int32)
        self.index = [ops.index_cache(PAGES, PAGE, 24, block) for ops in self.both]
        self.kv = [ops.kv_cache(PAGES, 2, PAGE, self.dim, 48, "f32", "f32") for ops in self.both]
        norm, self.rope = normal(2, 24), (np.array([1, 0.3, 0.01], np.float32), 1.1)
        self.norm = [weight(ops, norm) for ops in self.both]

    def __call__(self, batch: Batch) -> Array:
        keys = [1000 * s + p for s, p in zip(batch.slots, batch.positions, strict=True)]
        widths = 24, 2 * self.dim, 2 * 48, self.index_heads * 24, len(self.head_map) * self.dim
        made = [
            np.stack([normal(10_000 * i + key, n) for key in keys]) for i, n in enumerate(widths)
        ]
        batch = replace(batch, pages=(self.table,))
        answers, seen = [], []
        for ops, index, kv, norm in zip(self.both, self.index, self.kv, self.norm, strict=True):
            ops.index_store(index, made[0], norm, self.rope, batch, 0, 1e-6)
            ops.store_kv(kv, made[1], made[2], batch, 0)
            chosen = ops.choose_blocks(made[3], index, batch, 0, self.index_heads, self.top_k)
            seen.append(chosen)
            answers.append(
                ops.attention_to(chosen, made[4], kv, batch, 0, self.head_map, self.dim**-0.5)
            )
        for t, positions in enumerate(seen[1]):
            whole = (batch.positions[t] + 1) // self.block * self.block
            blocks = np.unique(positions[positions < whole] // self.block)
            mine = seen[0].blocks[t, : seen[0].counts[t]]
            np.testing.assert_array_equal(mine, blocks)
        close(answers[0], answers[1], 1e-5)
        return answers[0].copy()


@pytest.mark.parametrize(("block", "top_k", "heads"), [(4, 16, 4), (8, 32, 6), (16, 32, 34)])
def test_attention_to_chosen_blocks(isa: str, block: int, top_k: int, heads: int) -> None:
    layer = SparseLayer(block, top_k, heads)
    assert INDEX_RING % block == 0
    layer(batch_of([(0, 0, 70), (1, 0, 3)]))
    for start in (70, 71, 72, 73):
        layer(batch_of([(0, start, 1), (1, start - 67, 1)]))
    layer(batch_of([(0, 74, 86), (2, 0, 9)]))
    layer(batch_of([(1, 0, 50)]))  # another request


def test_chosen_blocks_do_not_depend_on_company_and_threads() -> None:
    rows = [(0, 0, 150), (1, 0, 20)]
    answers = [SparseLayer(4, 32, threads=threads)(batch_of(rows)) for threads in (1, 2, 5)]
    for other in answers[1:]:
        np.testing.assert_array_equal(other, answers[0])
    layer = SparseLayer(4, 32)
    for start, count in ((0, 100), (100, 1), (101, 8), (109, 41)):
        part = layer(batch_of([(0, start, count)]))
        np.testing.assert_array_equal(part, answers[0][start : start + count])


def test_padding_rows_of_an_index() -> None:
    layer = SparseLayer(4, 16)
    layer(batch_of([(0, 0, 40), (3, 7, 1), (3, 7, 1), (3, 7, 1)]))
    layer(batch_of([(0, 40, 4), (3, 7, 1), (3, 7, 1)]))


def test_many_pieces_of_chosen_blocks(isa: str) -> None:
    """More spans than are computed at once."""
    layer = SparseLayer(1, 100)
    layer(batch_of([(0, 0, 159)]))
    layer(batch_of([(0, 159, 1)]))


def test_of_equal_scores_the_first_blocks_are_chosen() -> None:
    ops = make_ops()
    index = ops.index_cache(PAGES, PAGE, 8, 4)
    table = np.arange(5, dtype=np.int32)[None]
    batch = batch_of([(0, 159, 1)], pages=(table,))
    index.pooled[:] = 0
    index.pooled[4, 0, 3] = 1  # block 35
    q = np.ones((1, 8), np.float32)
    chosen = ops.choose_blocks(q, index, batch, 0, 1, 16)
    assert chosen.blocks[0].tolist() == [0, 1, 2, 35]


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_chosen_positions_of_a_narrow_cache(kv: str) -> None:
    """All blocks chosen: what attention over every position gives."""
    ops, table = make_ops(), np.arange(5, dtype=np.int32)[None]
    batch = batch_of([(0, 0, 90)], pages=(table,))
    index, cache = ops.index_cache(5, PAGE, 8, 4), ops.kv_cache(5, 2, PAGE, 64, 64, kv, kv)
    ops.store_kv(cache, normal(0, 90, 128), normal(1, 90, 128), batch, 0)
    q, head_map = normal(2, 90, 4 * 64), [0, 0, 1, 1]
    chosen = ops.choose_blocks(normal(3, 90, 8), index, batch, 0, 1, 1000)
    ours = ops.attention_to(chosen, q, cache, batch, 0, head_map, 0.125)
    close(ours, ops.attention(q, cache, batch, 0, head_map, 0.125), 1e-5)
