"""The numpy Ops against formulas written out one number at a time."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
from voltapile.kernels.ops import (
    DONE_BEFORE,
    LENGTH,
    NOT_FINITE,
    RUNNING,
    STOP,
    Batch,
    SlotState,
    StepOutput,
    slot_state,
    step_output,
)
from voltapile.kernels.reference import sampling
from voltapile.kernels.reference.ops import ReferenceOps

ops = ReferenceOps()
rng = np.random.default_rng(11)
F32 = np.float32


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(F32)


def weight(values: np.ndarray) -> object:
    return ops.weight(values.astype(F32).view(np.uint8).reshape(-1), "F32", values.shape)


def batch_of(slots: list[int], positions: list[int], table: np.ndarray) -> Batch:
    n = len(slots)

    def array(values: list[int]) -> np.ndarray:
        return np.array(values, np.int32)

    return Batch(
        tokens=array([0] * n),
        slots=array(slots),
        positions=array(positions),
        rope_positions=array(positions),
        continues=array([0] * n),
        outputs=array(list(range(n))),
        pages=(table,),
    )


def state_of(slots: int) -> SlotState:
    return slot_state(ops, slots, 32)


def output_of(rows: int) -> StepOutput:
    return step_output(ops, rows)


def test_linear_bias_and_residual() -> None:
    x, w, b, residual = normal(3, 8), normal(5, 8), normal(5), normal(3, 5)
    expected = np.array([[sum(x[t] * w[n]) + b[n] for n in range(5)] for t in range(3)])
    np.testing.assert_allclose(ops.linear(x, weight(w), weight(b)), expected, rtol=1e-5, atol=1e-6)
    before = residual.copy()
    assert ops.linear(x, weight(w), weight(b), add_to=residual) is residual
    np.testing.assert_allclose(residual, before + expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_rows_of_a_quantised_table(kind: str) -> None:
    values = normal(6, 64)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    table = ops.weight(packed.view(np.uint8).reshape(-1), kind, values.shape)
    rows = ops.embed(table, np.array([4, 0, 4], np.int32))
    assert np.abs(rows - values[[4, 0, 4]]).max() < 0.3
    np.testing.assert_array_equal(rows, ops.dense(table)[[4, 0, 4]])
    np.testing.assert_array_equal(ops.embed(table, np.array([2], np.int32))[0], ops.dense(table)[2])
    np.testing.assert_array_equal(ops.embed(table, np.array([4], np.int32), 3.0)[0], rows[0] * 3)


def test_a_full_budget_keeps_nothing_more() -> None:
    small = ReferenceOps(keep_bytes=100)
    values = normal(4, 8)
    table = small.weight(values.view(np.uint8).reshape(-1), "F32", values.shape)
    np.testing.assert_array_equal(small.dense(table), values)
    assert table.dense is None


def test_rms_norm() -> None:
    x, w = normal(2, 6), normal(6)
    for row, found in zip(x, ops.rms_norm(x, weight(w), 1e-5), strict=True):
        root = math.sqrt(sum(float(v) ** 2 for v in row) / 6 + 1e-5)
        np.testing.assert_allclose(found, [v / root * g for v, g in zip(row, w, strict=True)], 1e-5)


def test_rms_norm_by_heads_onto_a_residual() -> None:
    x, w, residual = normal(2, 12), normal(4), normal(2, 12)
    heads = ops.rms_norm(x.reshape(6, 4), weight(w), 1e-5).reshape(2, 12)
    np.testing.assert_array_equal(ops.rms_norm(x, weight(w), 1e-5), heads)
    expected = residual + heads
    assert ops.rms_norm(x, weight(w), 1e-5, add_to=residual) is residual
    np.testing.assert_array_equal(residual, expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_glu(activation: str) -> None:
    x, gate, up = normal(2, 8) * 30, normal(3, 8), normal(3, 8)

    def act(v: float) -> float:
        if activation == "silu":
            return v / (1 + math.exp(-v)) if v > -700 else 0.0
        return 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))

    expected = [[act(float(g)) for g in row] for row in x @ gate.T] * (x @ up.T)
    found = ops.glu(x, weight(gate), weight(up), activation)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["norm", "neox"])
def test_rope(layout: str) -> None:
    """4 of 6 dimensions of each of two heads turn; the rest passes through."""
    x = normal(2, 12)
    angles = ops.rope_angles(np.array([3, 7], np.int32), np.array([1.0, 0.1], F32), 1.5)
    found = ops.rope_(x.copy(), angles, 6, layout).reshape(2, 2, 6)
    pairs = [(0, 1), (2, 3)] if layout == "norm" else [(0, 2), (1, 3)]
    for t, position in enumerate((3, 7)):
        for h, head in enumerate(x.reshape(2, 2, 6)[t]):
            expected = head.astype(np.float64)
            for i, (a, b) in enumerate(pairs):
                c = 1.5 * math.cos(position * (1.0, 0.1)[i])
                s = 1.5 * math.sin(position * (1.0, 0.1)[i])
                expected[a], expected[b] = head[a] * c - head[b] * s, head[a] * s + head[b] * c
            np.testing.assert_allclose(found[t, h], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (3, 0.0), (0, 2.0), (2, 1.5)])
def test_attention_over_pages(window: int, softcap: float) -> None:
    """Two sequences in scattered pages of 2, three query heads on two KV heads, d 4, dv 3."""
    cache = ops.kv_cache(9, 2, 2, 4, 3, "f32", "f32")
    table = np.array([[5, 1, 7], [2, 8, 3]], np.int32)
    lengths, head_map = (5, 4), [0, 1, 1]
    keys, values = [normal(n, 2, 4) for n in lengths], [normal(n, 2, 3) for n in lengths]
    for slot, n in enumerate(lengths):
        past = batch_of([slot] * n, list(range(n)), table)
        ops.store_kv(cache, keys[slot].reshape(n, 8), values[slot].reshape(n, 6), past, 0)
    asked = [(0, 3), (0, 4), (1, 3)]
    batch = batch_of([s for s, _ in asked], [p for _, p in asked], table)
    q = normal(3, 12)
    found = ops.attention(q, cache, batch, 0, head_map, 0.5, window, softcap).reshape(3, 3, 3)
    for t, (slot, position) in enumerate(asked):
        for h, kv in enumerate(head_map):
            first = max(0, position - window + 1) if window else 0
            scores = [
                0.5 * float(np.dot(q[t].reshape(3, 4)[h], keys[slot][p, kv]))
                for p in range(first, position + 1)
            ]
            if softcap:
                scores = [softcap * math.tanh(s / softcap) for s in scores]
            weights = [math.exp(s) for s in scores]
            expected = sum(
                w * values[slot][first + i, kv].astype(np.float64) for i, w in enumerate(weights)
            ) / sum(weights)
            np.testing.assert_allclose(found[t, h], expected, rtol=1e-5, atol=1e-6)


def test_copy_page() -> None:
    cache = ops.kv_cache(3, 1, 2, 4, 4, "f32", "f32")
    cache.keys[1], cache.values[1] = 3.0, 4.0
    ops.copy_page(cache, 1, 2)
    assert (cache.keys[2] == 3.0).all()
    assert (cache.values[2] == 4.0).all()
    assert not cache.keys[0].any()


def test_begin_takes_what_the_slots_hold() -> None:
    batch, state = batch_of([1, 0], [5, 6], np.zeros((2, 1), np.int32)), state_of(2)
    batch.continues[:] = [1, 0]
    state.last_token[:], state.next_position[:] = [8, 9], [40, 41]
    ops.begin(batch, state)
    assert batch.tokens.tolist() == [9, 0]
    assert batch.positions.tolist() == batch.rope_positions.tolist() == [41, 6]


# --- sampling -----------------------------------------------------------------------------


def test_random_numbers_are_what_random_md_says() -> None:
    """The first two are splitmix64's published outputs for the seeds 0 and 1234567."""
    assert sampling.splitmix(0) == 0xE220A8397B1DCDAF
    assert sampling.splitmix(1234567) == 6457827717110365317
    z = sampling.splitmix(sampling.splitmix(sampling.splitmix(5) ^ 9) ^ 0) >> 32
    assert sampling.uniform(5, 9, 0) == float(F32((z >> 8) * 2.0**-24))


def test_greedy_takes_the_first_of_equals() -> None:
    logits = np.array([[1, 3, 3, 2]], F32)
    out, state = output_of(1), state_of(1)
    state.logprobs[0] = 3
    ops.sample(logits, batch_of([0], [4], np.zeros((1, 1), np.int32)), state, out)
    assert (out.tokens[0], out.finish[0]) == (1, RUNNING)
    assert (state.last_token[0], state.next_position[0]) == (1, 5)
    total = math.exp(1) + 2 * math.exp(3) + math.exp(2)
    assert out.logprob_ids[0, :5].tolist() == [1, 1, 2, 3, -1]
    expected = [x - math.log(total) for x in (3, 3, 3, 2)]
    assert out.logprobs[0, :4].tolist() == pytest.approx(expected, abs=1e-6)
    assert not out.logprobs[0, 4:].any()


def test_finish_codes() -> None:
    logits = np.tile(np.array([0, 1, 9, 2], F32), (5, 1))
    logits[3, 1] = np.nan
    batch = batch_of([0, 1, 2, 3, 4], [4] * 5, np.zeros((5, 1), np.int32))
    state, out = state_of(5), output_of(5)
    state.stop_ids[1, 0] = 2
    state.max_position[2] = 6
    state.max_position[0] = 7
    state.finished[4] = STOP
    ops.sample(logits, batch, state, out)
    assert out.finish.tolist() == [RUNNING, STOP, LENGTH, NOT_FINITE, DONE_BEFORE]
    assert out.tokens.tolist() == [2, 2, 2, -1, -1]
    assert state.finished.tolist() == [RUNNING, STOP, LENGTH, NOT_FINITE, STOP]
    assert state.next_position.tolist() == [5, 5, 5, 0, 0]


def drawn(logits: np.ndarray, count: int = 4000, **parameters: float) -> np.ndarray:
    """How often each token is chosen over many positions, as a share."""
    state = state_of(1)
    state.temperature[0] = parameters.pop("temperature", 1.0)
    for name, value in parameters.items():
        vars(state)[name][0] = value
    chosen = [sampling.choose(logits, state, 0, position) for position in range(count)]
    return np.bincount(chosen, minlength=len(logits)) / count


P = np.array([0.1, 0.4, 0.15, 0.3, 0.05])
LOGITS = np.log(P).astype(F32)


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.71}, [1, 3, 2]),
        ({"top_p": 0.0}, [1]),
        ({"min_p": 0.3}, [1, 3, 2]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 3, "top_p": 0.75}, [1, 3]),  # of the three that are left, 0.82 is above it
        ({"top_p": 0.9, "min_p": 0.5}, [1, 3]),
    ],
)
def test_filters_keep_and_renormalise(parameters: dict[str, float], kept: list[int]) -> None:
    share = drawn(LOGITS, **parameters)
    expected = np.zeros(5)
    expected[kept] = P[kept] / P[kept].sum()
    assert np.abs(share - expected).max() < 0.03  # 4000 draws: a standard deviation is below 0.008
    assert set(np.flatnonzero(share)) <= set(kept)


def test_temperature_sharpens() -> None:
    share = drawn(LOGITS, temperature=0.5)
    assert np.abs(share - P**2 / (P**2).sum()).max() < 0.03


def test_equal_tokens_come_in_the_order_of_their_ids() -> None:
    """With top_k 2 of four equal tokens the lowest ids stay."""
    assert set(np.flatnonzero(drawn(np.zeros(4, F32), 200, top_k=2))) == {0, 1}


def adjusted_one_by_one(logits: list[float], state: SlotState, position: int) -> list[float]:
    """random.md's three lines for slot 0, a token at a time."""
    first = max(0, position - int(state.penalty_window[0])) if state.penalty_window[0] else 0
    bias = dict(zip(state.bias_ids[0].tolist(), state.bias_values[0].tolist(), strict=True))
    found = []
    for token, logit in enumerate(logits):
        places = [i for i in range(first, position) if state.history[0, i] == token]
        count = sum(i >= state.prompt_tokens[0] for i in places)
        x = logit + bias.get(token, 0.0)
        if places:
            r = float(state.repetition_penalty[0])
            x = x / r if x > 0 else x * r
        if count:
            x -= float(state.frequency_penalty[0]) * count + float(state.presence_penalty[0])
        found.append(x)
    return found


@pytest.mark.parametrize("window", [0, 1, 4, 100])
@pytest.mark.parametrize("prompt", [0, 5, 12, 20])
def test_bias_and_penalties(window: int, prompt: int) -> None:
    state, position = state_of(1), 12
    state.history[0] = rng.integers(-1, 9, 32)  # -1 and 8: no token of these eight
    state.prompt_tokens[0], state.penalty_window[0] = prompt, window
    state.repetition_penalty[0] = 1.75
    state.presence_penalty[0], state.frequency_penalty[0] = 0.5, -0.25
    state.bias_count[0] = 1024
    state.bias_ids[0] = -np.arange(1024) - 100
    state.bias_ids[0, :2], state.bias_values[0, :2], state.bias_count[0] = (3, 6), (4, -9), 2
    logits = normal(8)
    found = sampling.adjust(logits, state, 0, position)
    np.testing.assert_allclose(
        found, adjusted_one_by_one(logits.tolist(), state, position), rtol=1e-6, atol=1e-6
    )


def test_never_is_no_error_until_nothing_is_left() -> None:
    logits = np.array([[-np.inf, 1, -np.inf, 0.5]] * 3, F32)
    logits[1] = -np.inf
    logits[2, 3] = np.inf
    state, out = state_of(3), output_of(3)
    state.temperature[:], state.logprobs[:] = 1.0, 4
    ops.sample(logits, batch_of([0, 1, 2], [4] * 3, np.zeros((3, 1), np.int32)), state, out)
    assert out.finish.tolist() == [RUNNING, NOT_FINITE, NOT_FINITE]
    assert out.tokens[0] in (1, 3)
    assert out.logprob_ids[0, 1:].tolist() == [1, 3] + [-1] * 18
