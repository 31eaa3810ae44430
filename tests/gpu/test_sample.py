"""The sampler of the GPU against random.md in plain numpy, and the beginning of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.ops import (
    DONE_BEFORE,
    LENGTH,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    NOT_FINITE,
    RUNNING,
    STOP,
    Batch,
    SlotState,
    StepOutput,
    slot_state,
    step_output,
)
from voltapile.kernels.reference.ops import ReferenceOps

pytestmark = pytest.mark.gpu

CONTEXT = 128


class Case:
    """A step that samples one row for each slot, on the host."""

    def __init__(self, rows: int, **values: object) -> None:
        def ints(value: int) -> np.ndarray:
            return np.full(rows, value, np.int32)

        order = np.arange(rows, dtype=np.int32)
        self.batch = Batch(
            tokens=ints(0),
            slots=order[::-1].copy(),
            positions=order * 3 % CONTEXT,
            rope_positions=ints(0),
            continues=ints(0),
            outputs=order.copy(),
            pages=(),
        )
        self.state = slot_state(ReferenceOps(), rows, CONTEXT)
        self.out = step_output(ReferenceOps(), rows)
        self.state.last_token[:] = self.state.next_position[:] = -7
        self.state.seed[:] = np.arange(rows, dtype=np.uint64) * np.uint64(0x123456789ABCDEF)
        for name, value in values.items():
            getattr(self.state, name)[:] = value
        for array in vars(self.out).values():
            array[:] = -9

    def truth(self, logits: np.ndarray) -> tuple[SlotState, StepOutput]:
        """What the reference makes of it; the case stays as it is."""
        state, out = copied(self.state, np.copy), copied(self.out, np.copy)
        with np.errstate(all="ignore"):
            ReferenceOps().sample(logits, self.batch, state, out)
        return state, out


def copied(record: Any, copy: Callable[[Any], Any]) -> Any:
    """A record of arrays with each of them copied."""
    values = {each.name: getattr(record, each.name) for each in fields(record)}
    return replace(record, **{k: copy(v) for k, v in values.items() if hasattr(v, "dtype")})


Sampler = Callable[[Case, np.ndarray], tuple[SlotState, StepOutput]]


@pytest.fixture
def sample(cuda: Any, put: Any) -> Sampler:
    """sample(case, logits) -> state and output after the GPU's sampler."""

    def run(case: Case, logits: np.ndarray) -> tuple[SlotState, StepOutput]:
        cuda.reset_scratch()
        batch, state, out = (copied(each, put) for each in (case.batch, case.state, case.out))
        cuda.sample(put(logits), batch, state, out)
        return copied(state, cuda.to_host), copied(out, cuda.to_host)

    return run


def check(sample: Sampler, case: Case, logits: np.ndarray) -> StepOutput:
    """Everything as in the reference; gives the output."""
    state, out = sample(case, logits)
    true_state, true_out = case.truth(logits)
    np.testing.assert_array_equal(out.tokens, true_out.tokens)
    np.testing.assert_array_equal(out.finish, true_out.finish)
    np.testing.assert_array_equal(out.logprob_ids, true_out.logprob_ids)
    np.testing.assert_allclose(out.logprobs, true_out.logprobs, rtol=1e-5, atol=2e-5)
    for name in ("last_token", "next_position", "finished"):
        np.testing.assert_array_equal(getattr(state, name), getattr(true_state, name))
    return out


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"top_p": 0.999, "top_k": 500},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize(("vocab", "scale"), [(7, 1.0), (4096, 3.0), (30011, 0.0), (151936, 8.0)])
def test_tokens_follow_random_md(
    sample: Sampler, vocab: int, scale: float, temperature: float, filters: dict[str, float]
) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((5, vocab)) * scale).astype(np.float32)
    logits[1] = np.round(logits[1])  # many equal ones
    check(sample, Case(5, temperature=temperature, logprobs=0, **filters), logits)


def test_greedy_takes_the_lowest_of_equal_ids(sample: Sampler) -> None:
    logits = np.zeros((4, 20000), np.float32)
    logits[1, [19999, 5000, 4999]] = 2
    logits[2, -1] = 1
    logits[3, :3] = -0.0
    assert check(sample, Case(4), logits).tokens.tolist() == [0, 4999, 19999, 0]


def test_tiny_temperatures_are_greedy(sample: Sampler) -> None:
    logits = np.random.default_rng(0).standard_normal((4, 1000), np.float32) * 100
    for temperature in (1e-6, 1e-30, 1e-38):
        _, out = sample(Case(4, temperature=temperature), logits)
        assert out.tokens.tolist() == logits.argmax(axis=1).tolist()


def test_the_distribution_is_the_softmax(sample: Sampler) -> None:
    rows = 20000
    row = np.array([0, 1, 2, -1, 0.5, 1.5, -3, 0], np.float32)
    _, out = sample(Case(rows, temperature=0.8), np.repeat(row[None], rows, axis=0))
    p = np.exp(row.astype(np.float64) / 0.8)
    expected = rows * p / p.sum()
    observed = np.bincount(out.tokens, minlength=len(row))
    chi2 = ((observed - expected) ** 2 / expected).sum()
    assert chi2 < 24.3  # 7 degrees of freedom: exceeded once in a thousand


def test_a_draw_depends_on_no_other_row(sample: Sampler) -> None:
    logits = np.random.default_rng(1).standard_normal((6, 5000), np.float32)
    values: dict[str, object] = {
        "temperature": 1.0,
        "logprobs": 5,
        "frequency_penalty": 0.5,
        "history": 3,
    }
    _, whole = sample(Case(6, **values), logits)
    for row in range(6):
        case = Case(6, **values)
        case.batch.outputs = np.array([row], np.int32)
        _, alone = sample(case, logits[row : row + 1])
        for name in ("tokens", "finish", "logprob_ids", "logprobs"):
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(whole, name)[row])


def test_finish_codes(sample: Sampler) -> None:
    logits = np.zeros((6, 100), np.float32)
    logits[:, 42] = 1
    logits[3, 7] = np.nan
    logits[4, 99] = np.inf
    case = Case(6)
    slot = case.batch.slots  # of each row
    case.state.stop_ids[slot[0], MAX_STOP_IDS - 1] = 42
    case.state.max_position[slot[1]] = case.batch.positions[1] + 2
    case.state.finished[slot[2]] = LENGTH
    out = check(sample, case, logits)
    codes = [STOP, LENGTH, DONE_BEFORE, NOT_FINITE, NOT_FINITE, RUNNING]
    assert out.finish.tolist() == codes


def penalise(case: Case, vocab: int, seed: int) -> None:
    """History, prompt lengths, windows, penalties and biases at random, for six rows."""
    rng, state = np.random.default_rng(seed), case.state
    case.batch.positions[:] = [0, 1, 40, 99, CONTEXT - 1, 17]
    state.history[:] = rng.integers(-1, min(vocab + 3, 60), state.history.shape)
    state.prompt_tokens[:] = rng.integers(0, CONTEXT, 6)
    state.penalty_window[:] = rng.choice([0, 1, 7, 64, 1000], 6)
    running = case.batch.slots[:4]
    state.repetition_penalty[running] = rng.choice([0.5, 1.0, 1.3, 2.0], 4)
    state.presence_penalty[running] = rng.choice([-1.0, 0.0, 0.7], 4)
    state.frequency_penalty[running] = rng.choice([-0.3, 0.0, 0.45], 4)
    for slot in case.batch.slots[:3]:
        count = int(rng.integers(1, min(vocab, 1024) + 1))
        state.bias_ids[slot, :count] = rng.permutation(vocab)[:count]
        state.bias_values[slot, :count] = rng.choice([-100.0, -1e9, 0.1, 3.0], count)
        state.bias_count[slot] = count


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("vocab", [5, 16, 37, 1000, 4097, 151936])
def test_penalties_follow_random_md(sample: Sampler, vocab: int, temperature: float) -> None:
    for seed in range(2):
        rng = np.random.default_rng(seed)
        logits = (rng.standard_normal((6, vocab)) * 4).astype(np.float32)
        logits[2] = np.round(logits[2])
        case = Case(6, temperature=temperature, logprobs=vocab % 21)
        penalise(case, vocab, seed)
        assert (check(sample, case, logits).tokens >= 0).all()


@pytest.mark.parametrize("vocab", [1, 5, 20, 21, 333, 50000])
def test_the_best_come_in_order(sample: Sampler, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = np.round(rng.standard_normal((4, vocab)) * 3, 1).astype(np.float32)  # many ties
    logits[3, rng.random(vocab) < 0.9] = -np.inf
    logits[3, vocab // 2] = 0.0
    case = Case(4, logprobs=MAX_LOGPROBS, temperature=1.0)
    case.state.logprobs[case.batch.slots[1]] = -1
    case.state.logprobs[case.batch.slots[2]] = 2
    check(sample, case, logits)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("allowed", [1, 3, 700])
def test_minus_infinity_is_never_chosen(
    sample: Sampler, allowed: int, filters: dict[str, float]
) -> None:
    rng = np.random.default_rng(allowed)
    logits = np.full((5, 20000), -np.inf, np.float32)
    for row in logits:
        row[rng.permutation(20000)[:allowed]] = rng.standard_normal(allowed) * 5
    for temperature in (0.0, 0.7, 3.0):
        check(sample, Case(5, temperature=temperature, **filters), logits)


def test_not_finite(sample: Sampler) -> None:
    logits = np.zeros((5, 9000), np.float32)
    logits[0, 8999] = np.nan
    logits[1, 5000] = np.inf
    logits[2] = -np.inf
    logits[3, 1:] = -np.inf  # and the one that is left gets a bias beyond float32
    logits[4] = np.nan
    for temperature in (0.0, 1.0):
        case = Case(5, temperature=temperature)
        case.state.bias_count[case.batch.slots[3]] = 1
        case.state.bias_values[case.batch.slots[3], 0] = -np.inf
        assert (check(sample, case, logits).finish == NOT_FINITE).all()


def test_begin(cuda: Any, put: Any) -> None:
    def ints(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    empty = ints()
    batch = Batch(ints(5, 6, 7, 8), ints(2, 0, 1, 1), ints(1, 2, 3, CONTEXT), ints(4, 5, 6, 9),
                  ints(0, 1, 1, 0), empty, ())  # fmt: skip
    state = slot_state(ReferenceOps(), 3, CONTEXT)
    state.last_token[:], state.next_position[:] = (100, 101, 102), (50, CONTEXT, 52)
    mine, my_state = copied(batch, put), copied(state, put)
    cuda.begin(mine, my_state)
    ReferenceOps().begin(batch, state)
    for name in ("tokens", "positions", "rope_positions"):
        np.testing.assert_array_equal(cuda.to_host(getattr(mine, name)), getattr(batch, name))
    np.testing.assert_array_equal(cuda.to_host(my_state.history), state.history)
