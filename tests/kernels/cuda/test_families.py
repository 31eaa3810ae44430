"""Kernels of experts, delta nets, streams and sparse attention, run on the CPU from their own
source, against the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import delta, expert_stream, experts, norms, streams
from voltapile.kernels.cuda import rows as row_kernels
from voltapile.kernels.cuda.chunks import max_shared
from voltapile.kernels.families import (
    DeltaShape,
    DeltaWeights,
    NGramHash,
    NGramWeights,
)
from voltapile.kernels.ops import Batch
from voltapile.kernels.reference.families import ReferenceFamilyOps

from ..test_matmul import random_raw
from .emulated_families import EmulatedFamilies
from .emulation import has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no g++")
REF = ReferenceFamilyOps()
PAGE, SLOW = 64, pytest.mark.slow


@pytest.fixture(scope="module", params=[80, *(pytest.param(n, marks=SLOW) for n in (70, 75))])
def ops(request: pytest.FixtureRequest, folder: Path) -> Any:
    return EmulatedFamilies(request.param, folder, max_shared(request.param))


@pytest.fixture(scope="module")
def plain(folder: Path) -> EmulatedFamilies:
    """Where tensor cores are not used, architectures are alike."""
    return EmulatedFamilies(80, folder, max_shared(80))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def weights_of(ops: Any, values: np.ndarray, type_name: str = "F32") -> tuple[Any, Any]:
    """Ours and the reference's; of quantised formats any values."""
    if type_name in ("F32", "F16"):
        raw = values.astype({"F32": np.float32, "F16": np.float16}[type_name]).reshape(-1)
        raw = raw.view(np.uint8)
    else:
        raw = random_raw(type_name, values.size // values.shape[-1], values.shape[-1]).reshape(-1)
    return tuple(each.weight(raw, type_name, values.shape) for each in (ops, REF))


def batch_of(slots: list[int], positions: list[int], **fields: Any) -> Batch:
    count = len(slots)
    zeros = np.zeros(count, np.int32)
    own = np.array(slots, np.int32), np.array(positions, np.int32)
    pages = fields.pop("pages", ())
    return Batch(zeros, *own, own[1], zeros, zeros[:0], pages, **fields)


def device(ops: Any, batch: Batch) -> Batch:
    """The same in emulated memory."""

    def own(x: Any) -> Any:
        return None if x is None else ops.array(x)

    return replace(
        batch,
        tokens=own(batch.tokens),
        slots=own(batch.slots),
        positions=own(batch.positions),
        pages=tuple(ops.array(each) for each in batch.pages),
        history=own(batch.history),
        kept=own(batch.kept),
    )


# --- experts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "width", "type_name"),
    [
        (6, 64, "F32"),
        (40, 4100, "F32"),
        (512, 64, "F16"),
        (700, 64, "F32"),
        (16, 66, "F32"),
        (16, 64, "Q8_0"),
    ],
)
def test_route(ops: Any, experts: int, width: int, type_name: str) -> None:
    x, router = normal(0, 11, width), normal(1, experts, width)
    x[1] = 0  # all alike: the first
    mine, theirs = weights_of(ops, router, type_name)
    counts = np.zeros((2, experts), np.int64)
    own_counts = ops.array(counts)
    batch = batch_of([0] * 11, [0] * 11, generated=9)
    for is_rounded in (False, True):
        there = ops.array(x), mine, 4, own_counts, device(ops, batch), is_rounded
        chosen, weights = ops.route(*there)
        expected = REF.route(x, theirs, 4, counts, batch, is_rounded)
        np.testing.assert_array_equal(ops.to_host(chosen), expected[0])
        tolerance = 2e-3 if type_name == "Q8_0" else 2e-5
        np.testing.assert_allclose(ops.to_host(weights), expected[1], tolerance, tolerance)
        one = ops.route(ops.array(x[10:]), mine, 4, ops.array(counts), there[4], is_rounded)
        np.testing.assert_array_equal(ops.to_host(one[1])[0], ops.to_host(weights)[10])
    np.testing.assert_array_equal(ops.to_host(own_counts), counts)


@pytest.mark.parametrize(("experts", "used"), [(128, 8), (160, 10), (520, 32)])
def test_equal_experts(plain: Any, experts: int, used: int) -> None:
    """The first of them are chosen, wherever they lie; what is no number has no share either."""
    rows = normal(1, 7, 16)[np.arange(experts) % 7]
    for tokens in (1, 3, 8):
        x, counts = normal(0, tokens, 16), np.zeros((2, experts), np.int64)
        for broken in (rows, np.where(np.arange(experts)[:, None] % 7 == 2, np.nan, rows)):
            router, _ = weights_of(plain, broken.astype(np.float32))
            batch = batch_of([0] * tokens, [0] * tokens, generated=tokens)
            there = plain.array(x), router, used, plain.array(counts), device(plain, batch)
            chosen, weights = (plain.to_host(each) for each in plain.route(*there))
            logits = x @ broken[:7].T
            logits = np.where(np.isnan(logits), -np.inf, logits)[:, np.arange(experts) % 7]
            expected = np.argsort(-logits, axis=1, kind="stable")[:, :used]
            np.testing.assert_array_equal(chosen, expected)
            shares = np.exp(np.take_along_axis(logits - logits.max(1, keepdims=True), expected, 1))
            np.testing.assert_allclose(weights, shares / shares.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("count", [1, 31, 128, 250, 512, 1000])
def test_choice(plain: Any, count: int) -> None:
    """Of logits of which many are alike, in any order, or all in one lane's."""
    logits = np.round(2 * normal(3, 9, count))
    logits[0] = np.arange(count)
    logits[1] = -logits[0]
    logits[2] = np.arange(count) % 32
    logits[3, 5:] = -np.inf
    for used in {min(used, count) for used in (1, 2, 3, 8, 10, 32)}:
        counts = plain.array(np.zeros((2, count), np.int64))
        chosen, weights = experts.choose(plain, plain.array(logits), used, counts, 9)
        expected = np.argsort(-logits, axis=1, kind="stable")[:, :used]
        np.testing.assert_array_equal(plain.to_host(chosen), expected)
        shares = np.exp(np.take_along_axis(logits - logits.max(1, keepdims=True), expected, 1))
        shares /= shares.sum(1, keepdims=True)
        np.testing.assert_allclose(plain.to_host(weights), shares, rtol=1e-5)
        found = np.bincount(expected.reshape(-1), minlength=count)
        np.testing.assert_array_equal(plain.to_host(counts), [0 * found, found])


def test_no_number_at_all(plain: Any) -> None:
    router, _ = weights_of(plain, normal(1, 128, 16))
    x, counts = np.full((1, 16), np.nan, np.float32), np.zeros((2, 128), np.int64)
    batch = batch_of([0], [0], generated=1)
    there = plain.array(x), router, 8, plain.array(counts), device(plain, batch)
    chosen, weights = (plain.to_host(each) for each in plain.route(*there))
    np.testing.assert_array_equal(chosen, [np.arange(8)])
    assert np.isnan(weights).all()


def test_more_tokens_than_tickets_are_several_launches(plain: Any) -> None:
    tokens, count = 21, 40
    x, (router, _) = plain.array(normal(0, tokens, 32)), weights_of(plain, normal(1, count, 32))
    found = []
    for tickets in (plain.tickets, plain.zeros((8 * count + 5,), np.uint32)):
        counts, since = plain.array(np.zeros((2, count), np.int64)), len(plain.launched)
        made = experts.route(plain, x, router, 3, counts, 17, tickets, False)
        found.append([plain.to_host(each) for each in (*made, counts)])
        assert not plain.to_host(tickets).any()
    assert len(plain.launched) == since + 3
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("tokens", "width", "type_name"),
    [(1, 2048, "F32"), (3, 768, "F16"), (11, 1024, "BF16"), (2, 2304, "F32"), (9, 4096, "F32")],
)
def test_route_norms_what_it_reads(plain: Any, tokens: int, width: int, type_name: str) -> None:
    """A late norm has the bits of a launched one; logits are those of the same rows, made before or
    not, with others or alone."""
    raw, gains = normal(0, tokens, width), normal(2, width)
    x, (gain, _) = plain.array(raw), weights_of(plain, gains)
    router, theirs = weights_of(plain, normal(1, 40, width), type_name)
    found = []
    for case in ("late", "made", "alone"):
        rows = x[tokens - 1 :] if case == "alone" else x
        batch = batch_of([0] * len(rows), [0] * len(rows), generated=len(rows))
        h = norms.Normed(plain, rows, gain, 1e-6)
        if case == "made":
            h.make()
        counts = plain.array(np.zeros((2, 40), np.int64))
        made = plain.route(h, router, 4, counts, device(plain, batch))
        assert not h.is_late
        found.append([plain.to_host(each) for each in (*made, h)])
        launched = plain.to_host(row_kernels.rms_norm(plain, rows, gain, 1e-6))
        np.testing.assert_array_equal(found[-1][2], launched)
    for late, other, alone in zip(*found, strict=True):
        np.testing.assert_array_equal(late, other)
        np.testing.assert_array_equal(late[tokens - 1 :], alone)
    normed = raw / np.sqrt((raw**2).mean(1, keepdims=True) + 1e-6) * gains
    batch = batch_of([0] * tokens, [0] * tokens, generated=tokens)
    counts = np.zeros((2, 40), np.int64)
    expected = REF.route(normed.astype(np.float32), theirs, 4, counts, batch)
    np.testing.assert_array_equal(found[0][0], expected[0])
    np.testing.assert_allclose(found[0][1], expected[1], 1e-4, 1e-5)


def test_who_does_not_norm_what_it_routes(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is rounded first, long rows, prompts."""

    def launched(width: int, is_rounded: bool = False, count: int = 2) -> Any:
        x, (gain, _) = plain.array(normal(0, count, width)), weights_of(plain, normal(2, width))
        router, _ = weights_of(plain, normal(1, 8, width))
        h, counts = norms.Normed(plain, x, gain, 1e-6), np.zeros((2, 8), np.int64)
        batch = device(plain, batch_of([0] * count, [0] * count, generated=count))
        since = len(plain.launched)
        plain.route(h, router, 4, plain.array(counts), batch, is_rounded)
        return [each.function for each, _, _ in plain.launched[since:]]

    assert launched(768) == ["route"]
    assert launched(768, is_rounded=True) == ["rms_norm_rows", "route"]
    assert launched(4352) == ["rms_norm_rows", "route"]
    monkeypatch.setattr(plain, "alone", 2)
    assert launched(768, count=70) == ["rms_norm_rows", "route", "route_many", "choose_experts"]


@pytest.mark.parametrize(
    ("tokens", "multiprocessors", "are_apart"), [(1, 22, True), (1, 21, False), (9, 38, True)]
)
def test_blocks_of_a_router_have_a_multiprocessor_each(
    folder: Path, tokens: int, multiprocessors: int, are_apart: bool
) -> None:
    """20 or 10 that multiply, one for each token that is normed, up to 8, and one that chooses."""
    ops = EmulatedFamilies(90, folder, max_shared(90))
    ops.multiprocessors = multiprocessors
    x, (gain, _) = ops.array(normal(0, tokens, 768)), weights_of(ops, normal(2, 768))
    router, _ = weights_of(ops, normal(1, 40, 768))
    batch = device(ops, batch_of([0] * tokens, [0] * tokens, generated=tokens))
    counts = ops.array(np.zeros((2, 40), np.int64))
    ops.route(norms.Normed(ops, x, gain, 1e-6), router, 4, counts, batch)
    shared = ops.launched[-1][2]
    assert ((228 << 10) // (shared + 1024) == 1) == are_apart


@pytest.mark.parametrize(("experts", "width"), [(6, 64), (130, 100)])
def test_route_of_prompts(
    ops: Any, monkeypatch: pytest.MonkeyPatch, experts: int, width: int
) -> None:
    """The first five rows keep their bits."""
    tokens = 75
    x = normal(0, tokens, width)
    mine, theirs = weights_of(ops, normal(1, experts, width))
    counts = np.zeros((2, experts), np.int64)
    own_counts = ops.array(counts)
    batch = batch_of([0] * tokens, [0] * tokens, generated=5)
    plain = ops.to_host(ops.route(ops.array(x[:5]), mine, 4, ops.array(counts), batch)[1])
    monkeypatch.setattr(ops, "alone", 5)
    for is_rounded in (True, False):
        chosen, weights = ops.route(ops.array(x), mine, 4, own_counts, batch, is_rounded)
        expected = REF.route(x, theirs, 4, counts, batch, is_rounded)
        np.testing.assert_array_equal(ops.to_host(chosen), expected[0])
        np.testing.assert_allclose(ops.to_host(weights), expected[1], 2e-5, 2e-5)
    np.testing.assert_array_equal(ops.to_host(weights)[:5], plain)
    np.testing.assert_array_equal(ops.to_host(own_counts), counts)


MIXES = [
    ("F16", "F16", "F16", 72, 40),
    ("Q8_0", "Q8_0", "Q8_0", 64, 96),
    ("Q4_K", "Q4_K", "Q6_K", 512, 256),
    ("IQ4_NL", "Q5_0", "Q4_K", 64, 256),
    ("F32", "F32", "F16", 72, 32),
]


@pytest.mark.parametrize(("gate", "up", "down", "width", "inner"), MIXES)
def test_experts(ops: Any, gate: str, up: str, down: str, width: int, inner: int) -> None:
    """Of 5 experts 1 to 3 are here."""
    shapes = (gate, (3, inner, width)), (up, (3, inner, width)), (down, (3, width, inner))
    made = [
        weights_of(ops, 0.1 * normal(seed, *shape), name)
        for seed, (name, shape) in enumerate(shapes)
    ]
    x, old = normal(7, 3, width), normal(8, 3, width)
    chosen = np.array([[3, 0, 1], [2, 3, 4], [4, 0, 4]], np.int32)
    weights = np.abs(normal(9, 3, 3))
    table, truth = (
        each.expert_table(*(m[i] for m in made), 1) for i, each in enumerate((ops, REF))
    )
    expected = REF.experts(x, (chosen, weights), truth)
    routing = ops.array(chosen), ops.array(weights)
    found = ops.to_host(ops.experts(ops.array(x), routing, table))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=1e-3 * scale)
    added = ops.to_host(ops.experts(ops.array(x), routing, table, ops.array(old)))
    np.testing.assert_allclose(added, old + found, atol=1e-6 * scale)
    alone = [
        ops.to_host(ops.experts(*(ops.array(v) for v in (x[i : i + 1],)), tuple(
            ops.array(each[i : i + 1]) for each in (chosen, weights)), table))
        for i in range(3)
    ]  # fmt: skip
    np.testing.assert_array_equal(np.concatenate(alone), found)
    more = np.resize(np.arange(3), 7)  # which other kernels add up
    together = ops.experts(
        ops.array(x[more]), tuple(ops.array(each[more]) for each in (chosen, weights)), table
    )
    np.testing.assert_array_equal(ops.to_host(together), found[more])


@pytest.mark.parametrize(
    ("up", "down", "width", "inner"),
    [pytest.param("Q4_K", "Q6_K", 256, 256, marks=SLOW), ("Q8_0", "Q5_0", 160, 96)],
)
def test_experts_of_many_tokens(
    ops: Any, monkeypatch: pytest.MonkeyPatch, up: str, down: str, width: int, inner: int
) -> None:
    """The first two rows keep their bits; an expert that nobody chose, and one of two tiles."""
    shapes = (up, (4, inner, width)), (up, (4, inner, width)), (down, (4, width, inner))
    made = [weights_of(ops, np.zeros(shape, np.float32), name) for name, shape in shapes]
    tokens, rng = 230, np.random.default_rng(0)
    x, old = normal(7, tokens, width), normal(8, tokens, width)
    chosen = np.stack([rng.permutation([0, 1, 2, 4, 5])[:3] for _ in range(tokens)]).astype(
        np.int32
    )
    weights = np.abs(normal(9, tokens, 3))
    table, truth = (
        each.expert_table(*(m[i] for m in made), 1) for i, each in enumerate((ops, REF))
    )
    expected = old + REF.experts(x, (chosen, weights), truth)
    routing = ops.array(chosen), ops.array(weights)
    plain = ops.to_host(ops.experts(ops.array(x[:2]), (routing[0][:2], routing[1][:2]), table))
    with monkeypatch.context() as patch:
        patch.setattr(ops, "alone", 2)
        found = ops.to_host(ops.experts(ops.array(x), routing, table, ops.array(old)))
    np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(expected).max())
    np.testing.assert_array_equal(found[:2], old[:2] + plain)


@pytest.mark.parametrize(
    "name", ["Q6_K", *(pytest.param(name, marks=SLOW) for name in ("Q4_K", "Q5_K", "Q8_0"))]
)
def test_experts_are_alike_however_they_lie(
    ops: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In tiles, row by row, and the last one by itself; of few tokens and of many. Streams take
    tiles alone."""
    monkeypatch.setattr(expert_stream, "fits", lambda *_: False)
    shapes = (3, 256, 512), (3, 256, 512), (3, 512, 256)
    raws = [random_raw(name, 3 * rows, columns, rows) for _, rows, columns in shapes]
    tokens, rng = 40, np.random.default_rng(0)
    x = normal(7, tokens, 512)
    chosen = np.stack([rng.permutation(4)[:3] for _ in range(tokens)]).astype(np.int32)
    routing = ops.array(chosen), ops.array(np.abs(normal(9, tokens, 3)))
    found = []
    for lies in ((True, True, True), (False, False, False), (True, True, False)):
        weights = []
        for raw, shape, is_tiled in zip(raws, shapes, lies, strict=True):
            monkeypatch.setattr(ops, "tiles", is_tiled)
            weights.append(ops.weight(raw.reshape(-1), name, shape))
            assert weights[-1].is_tiled == is_tiled
        table = ops.expert_table(*weights, 1)
        monkeypatch.setattr(ops, "alone", 3)
        found.append(ops.to_host(ops.experts(ops.array(x), routing, table)))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


def test_gates(plain: Any) -> None:
    y, x, w = normal(0, 3, 70), normal(1, 3, 50), normal(2, 50)
    mine, theirs = weights_of(plain, w)
    found = plain.to_host(plain.gate_rows_(plain.array(y), plain.array(x), mine))
    np.testing.assert_allclose(found, REF.gate_rows_(y.copy(), x, theirs), rtol=2e-5, atol=1e-6)
    gate = normal(3, 3, 70)
    found = plain.to_host(plain.gate_(plain.array(y), plain.array(gate)))
    np.testing.assert_allclose(found, REF.gate_(y.copy(), gate), rtol=2e-5, atol=1e-6)
    first = plain.split_heads(plain.array(y), 7)
    for mine, theirs in zip(first, REF.split_heads(y, 7), strict=True):
        np.testing.assert_array_equal(plain.to_host(mine), theirs)
    own, (_, late) = plain.array(x[:, :35]), plain.split_heads(plain.array(y), 7)
    found = plain.gate_(own, late)
    assert late.is_late  # taken from where it lies
    expected = REF.gate_(x[:, :35].copy(), REF.split_heads(y, 7)[1])
    np.testing.assert_allclose(plain.to_host(found), expected, rtol=2e-5, atol=1e-6)


# --- states ---------------------------------------------------------------------------------

# Steps of (slot, position, tokens) rows; whether they are provisional, what stands of the last.
STEPS: list[tuple[list[tuple[int, int, int]], bool, int]] = [
    ([(1, 0, 5), (0, 0, 1)], False, 9),
    ([(0, 1, 1), (1, 5, 2)], False, 9),
    ([(0, 2, 3), (1, 7, 8)], True, 9),
    ([(1, 9, 1), (0, 3, 2)], True, 2),
    ([(0, 4, 40), (1, 10, 1)], False, 1),
    ([(0, 0, 2), (2, 0, 1)], False, 9),  # a new request in a used slot
    ([(2, 1, 1), (0, 2, 1)], True, 9),
    ([(2, 1, 1), (0, 3, 1)], False, 0),
]


def steps(slots: int) -> list[Batch]:
    found = []
    for rows, is_provisional, stands in STEPS:
        at = [slot for slot, _, count in rows for _ in range(count)]
        where = [start + i for _, start, count in rows for i in range(count)]
        kept = np.full(slots, stands, np.int32)
        found.append(batch_of(at, where, kept=kept, is_provisional=is_provisional))
    return found


def compare_states(ops: Any, mine: Any, theirs: Any, slots: int) -> None:
    """Both sides save and restore to the same; what they hold is told by what follows."""
    [saved] = ops.checkpoint_memory([mine], 1)
    assert 0 <= saved.nbytes - REF.state_bytes(theirs) < 16 * len(mine.slot_arrays(0))
    for slot in range(slots):
        ops.save_states([mine], slot, saved)
        before = [ops.to_host(each) for each in mine.slot_arrays(slot)]
        for each in mine.slot_arrays(slot):
            ops.upload(each, np.zeros(each.shape, each.dtype))
        ops.restore_states([mine], slot, saved)
        for array, old in zip(mine.slot_arrays(slot), before, strict=True):
            np.testing.assert_array_equal(ops.to_host(array), old)


@pytest.mark.parametrize(
    ("keys", "values", "dim", "gate"),
    [pytest.param(2, 6, 64, "silu", marks=pytest.mark.slow), (1, 2, 128, "sigmoid")],
)
def test_delta_net(plain: Any, keys: int, values: int, dim: int, gate: str) -> None:
    of = tuple(i % keys for i in range(values))
    shape = DeltaShape(keys, values, dim, 4, of, gate, 1e-6)
    raw = (
        normal(1, shape.channels, 4),
        -np.abs(normal(2, values)),
        normal(3, values),
        normal(4, dim),
    )
    mine, theirs = (
        DeltaWeights(*parts)
        for parts in zip(*(weights_of(plain, each) for each in raw), strict=True)
    )
    own, truth = plain.delta_state(3, shape), REF.delta_state(3, shape)
    for seed, batch in enumerate(steps(3)):
        count = len(batch.slots)
        widths = shape.channels, values * dim, 2 * values
        inputs = tuple(normal(10 * seed + i, count, width) for i, width in enumerate(widths))
        expected = REF.delta_net(inputs, theirs, shape, truth, batch)
        found = plain.delta_net(
            tuple(plain.array(each) for each in inputs), mine, shape, own, device(plain, batch)
        )
        np.testing.assert_allclose(plain.to_host(found), expected, rtol=2e-4, atol=2e-5)
    compare_states(plain, own, truth, 3)


@pytest.fixture
def clustered(folder: Path) -> EmulatedFamilies:
    return EmulatedFamilies(90, folder, max_shared(90))


@pytest.mark.parametrize(
    ("keys", "values", "dim", "taps"), [(2, 5, 64, 3), pytest.param(1, 3, 128, 4, marks=SLOW)]
)
def test_two_blocks_of_a_head_change_no_bits(
    clustered: Any, monkeypatch: pytest.MonkeyPatch, keys: int, values: int, dim: int, taps: int
) -> None:
    """Nor what is remembered: of single tokens, drafts, and those of them that stand."""
    ops, found = clustered, []
    of = tuple(i % keys for i in range(values))
    shape = DeltaShape(keys, values, dim, taps, of, "silu", 1e-6)
    raw = normal(1, shape.channels, taps), -np.abs(normal(2, values)), normal(3, values)
    weights = DeltaWeights(*(weights_of(ops, each)[0] for each in (*raw, normal(4, dim))))
    for pairs in (delta.PAIR, {}):
        monkeypatch.setattr(delta, "PAIR", pairs)
        state, made = ops.delta_state(3, shape), []
        for seed, batch in enumerate(steps(3)):
            widths = shape.channels, values * dim, 2 * values
            inputs = [normal(10 * seed + i, len(batch.slots), n) for i, n in enumerate(widths)]
            there = tuple(map(ops.array, inputs)), weights, shape, state, device(ops, batch)
            made.append(ops.to_host(ops.delta_net(*there)).copy())
            made += [ops.to_host(each).copy() for each in (*state.values, *state.log, state.logged)]
        found.append(made)
    if isinstance(ops, EmulatedFamilies):  # a GPU's Ops do not tell
        assert {"delta_pair", "delta_row"} <= {each.function for each, *_ in ops.launched}
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_drafts_change_no_bits(plain: Any) -> None:
    """What stands of a provisional step is what single tokens would have made."""
    shape = DeltaShape(1, 2, 64, 4, (0, 0), "silu", 1e-6)
    raw = normal(1, shape.channels, 4), -np.abs(normal(2, 2)), normal(3, 2), normal(4, 64)
    weights = DeltaWeights(*(weights_of(plain, each)[0] for each in raw))
    widths = shape.channels, 128, 4
    inputs = [normal(i, 9, width) for i, width in enumerate(widths)]

    def run(state: Any, start: int, stop: int, **fields: Any) -> np.ndarray:
        batch = batch_of([0] * (stop - start), list(range(start, stop)), **fields)
        part = tuple(plain.array(each[start:stop]) for each in inputs)
        found = plain.delta_net(part, weights, shape, state, device(plain, batch))
        return np.asarray(plain.to_host(found))

    single = plain.delta_state(1, shape)
    expected = np.concatenate([run(single, i, i + 1) for i in range(9)])
    drafted = plain.delta_state(1, shape)
    run(drafted, 0, 2)
    np.testing.assert_array_equal(run(drafted, 2, 7, is_provisional=True), expected[2:7])
    kept = np.array([3], np.int32)
    np.testing.assert_array_equal(run(drafted, 5, 9, kept=kept), expected[5:])


@pytest.mark.parametrize("taps", [pytest.param("F32", marks=pytest.mark.slow), "F16"])
def test_ngrams_join_the_streams(plain: Any, taps: str) -> None:
    count, width, dilation = 4, 40, 3
    channels = count * width
    names = "norm_key", "norm_query", "norm_conv"
    norms = [weights_of(plain, normal(i, channels)) for i in range(3)]
    conv = weights_of(plain, normal(4, channels, 4), taps)
    mine, theirs = (
        NGramWeights(**dict(zip(names, (n[i] for n in norms), strict=True)), conv1d=conv[i],
                     dilation=dilation)
        for i in range(2)
    )  # fmt: skip
    own, truth = (each.ngram_state(3, channels, 9) for each in (plain, REF))
    for seed, batch in enumerate(steps(3)):
        tokens = len(batch.slots)
        x, key, value = (
            normal(10 * seed + i, tokens, n) for i, n in enumerate((channels, channels, width))
        )
        device_arrays = [plain.array(each) for each in (x, key, value)]
        expected = REF.ngram_add_(x, key, value, theirs, truth, batch, 1e-6)
        found = plain.ngram_add_(*device_arrays, mine, own, device(plain, batch), 1e-6)
        np.testing.assert_allclose(plain.to_host(found), expected, rtol=1e-4, atol=2e-5)
    compare_states(plain, own, truth, 3)


# --- streams --------------------------------------------------------------------------------


def test_streams(plain: Any) -> None:
    count, width = 4, 300
    x, gate, y = normal(0, 3, count * width), normal(1, 3, count * width), normal(2, 3, width)
    inject = normal(3, 3, count)
    mine, theirs = weights_of(plain, normal(4, count * width))
    own = {
        name: plain.array(v) for name, v in {"x": x, "gate": gate, "y": y, "inject": inject}.items()
    }
    pairs = [
        (plain.streams(own["y"], count), REF.streams(y, count)),
        (plain.stream_norm(own["x"], mine, width, 1e-6), REF.stream_norm(x, theirs, width, 1e-6)),
        (plain.stream_mix(own["x"], own["gate"], width), REF.stream_mix(x, gate, width)),
        (
            plain.stream_add_(plain.array(x), own["inject"], own["y"]),
            REF.stream_add_(x.copy(), inject, y),
        ),
        (plain.silu_(plain.array(x), 0.25), REF.silu_(x.copy(), 0.25)),
    ]
    for found, expected in pairs:
        np.testing.assert_allclose(plain.to_host(found), expected, rtol=2e-5, atol=2e-6)
    added, before = plain.array(x), (own["inject"], own["y"])
    found = streams.stream_norm(plain, added, mine, width, 1e-6, before)
    np.testing.assert_array_equal(plain.to_host(added), plain.to_host(pairs[3][0]))
    expected = REF.stream_norm(pairs[3][1], theirs, width, 1e-6)
    np.testing.assert_allclose(plain.to_host(found), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("type_name", "width"), [("F16", 64), ("Q8_0", 64), ("Q8_0", 512), ("IQ4_NL", 64), ("Q5_0", 64)]
)
def test_ngram_rows(plain: Any, type_name: str, width: int) -> None:
    rng = np.random.default_rng(0)
    hashing = NGramHash(
        tuple(int(n) for n in rng.integers(2**40, 2**62, 3)), (97, 101, 103, 107),
        (0, 97, 198, 301), 7,
    )  # fmt: skip
    history = rng.integers(0, 9, (2, 30)).astype(np.int32)
    batch = batch_of([1] * 20 + [0], [*range(20), 25], history=history)
    rows = plain.ngram_rows(device(plain, batch), hashing)
    expected = REF.ngram_rows(batch, hashing)
    np.testing.assert_array_equal(plain.to_host(rows), expected)
    mine, theirs = weights_of(plain, normal(1, 416, width), type_name)
    found = plain.to_host(plain.ngram_gather(mine, rows))
    np.testing.assert_array_equal(found, REF.ngram_gather(theirs, expected))
