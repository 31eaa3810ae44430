"""The C++ sampler against random.md in plain numpy, and against the distribution itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from voltapile.kernels.cpu import _cpu
from voltapile.kernels.cpu.ops import CpuOps
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
from voltapile.kernels.reference import sampling
from voltapile.kernels.reference.ops import ReferenceOps

ISAS = ("plain", "avx2", "avx512")
CONTEXT = 128


@dataclass
class Case:
    """A step that samples one row for each slot."""

    batch: Batch
    state: SlotState
    out: StepOutput


def make_case(rows: int, **fields: object) -> Case:
    def ints(value: int) -> np.ndarray:
        return np.full(rows, value, np.int32)

    order = np.arange(rows, dtype=np.int32)
    batch = Batch(
        tokens=ints(0),
        slots=order[::-1].copy(),
        positions=order * 3,
        rope_positions=ints(0),
        continues=ints(0),
        outputs=order.copy(),
        pages=(),
    )
    state, out = slot_state(ReferenceOps(), rows, CONTEXT), step_output(ReferenceOps(), rows)
    state.last_token[:] = state.next_position[:] = -7
    state.seed[:] = np.arange(rows, dtype=np.uint64) * np.uint64(0x123456789ABCDEF)
    for name, value in fields.items():
        getattr(state, name)[:] = value
    for array in vars(out).values():
        array[:] = -9
    return Case(batch, state, out)


def sample(ops: CpuOps | ReferenceOps, logits: np.ndarray, rows: int, **fields: object) -> Case:
    case = make_case(rows, **fields)
    ops.sample(logits, case.batch, case.state, case.out)
    return case


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps(2, 1 << 26)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this CPU has."""
    before = _cpu.isa()
    try:
        _cpu.set_isa(request.param)
    except ValueError:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    _cpu.set_isa(before)


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
@pytest.mark.parametrize(("vocab", "scale"), [(7, 1.0), (4096, 3.0), (30011, 0.0), (49152, 8.0)])
def test_tokens_follow_random_md(
    ops: CpuOps,
    isa: str,
    vocab: int,
    scale: float,
    temperature: float,
    filters: dict[str, float],
) -> None:
    rows = 5
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((rows, vocab)) * scale).astype(np.float32)
    logits[1] = np.round(logits[1])  # many equal ones
    fields = {"temperature": temperature, "logprobs": 0, **filters}
    ours = sample(ops, logits, rows, **fields)
    truth = sample(ReferenceOps(), logits, rows, **fields)
    np.testing.assert_array_equal(ours.out.tokens, truth.out.tokens)
    np.testing.assert_array_equal(ours.state.last_token, truth.state.last_token)
    np.testing.assert_array_equal(ours.state.next_position, truth.state.next_position)
    np.testing.assert_allclose(ours.out.logprobs, truth.out.logprobs, rtol=1e-5, atol=1e-5)


def test_greedy_takes_the_lowest_of_equal_ids(ops: CpuOps) -> None:
    logits = np.zeros((3, 20000), np.float32)
    logits[1, [19999, 5000, 4999]] = 2
    logits[2, -1] = 1
    case = sample(ops, logits, 3)
    assert case.out.tokens.tolist() == [0, 4999, 19999]


def test_tiny_temperatures_are_greedy(ops: CpuOps) -> None:
    logits = np.random.default_rng(0).standard_normal((4, 1000), np.float32) * 100
    for temperature in (1e-6, 1e-30, 1e-38):
        case = sample(ops, logits, 4, temperature=temperature)
        assert case.out.tokens.tolist() == logits.argmax(axis=1).tolist()


def test_the_distribution_is_the_softmax(ops: CpuOps) -> None:
    rows, vocab = 20000, 8
    row = np.array([0, 1, 2, -1, 0.5, 1.5, -3, 0], np.float32)
    logits = np.repeat(row[None], rows, axis=0)
    tokens = sample(ops, logits, rows, temperature=0.8).out.tokens
    p = np.exp(row.astype(np.float64) / 0.8)
    expected = rows * p / p.sum()
    observed = np.bincount(tokens, minlength=vocab)
    chi2 = ((observed - expected) ** 2 / expected).sum()
    assert chi2 < 24.3  # 7 degrees of freedom: exceeded once in a thousand


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = np.random.default_rng(1).standard_normal((6, 5000), np.float32)
    fields = {"temperature": 1.0, "logprobs": 5, "frequency_penalty": 0.5, "history": 3}
    whole = sample(CpuOps(3, 1 << 20), logits, 6, **fields)
    alone = CpuOps(1, 1 << 20)
    for row in range(6):
        case = make_case(6, **fields)
        case.batch.outputs = np.array([row], np.int32)
        alone.sample(logits[row : row + 1], case.batch, case.state, case.out)
        assert case.out.tokens[0] == whole.out.tokens[row]
        assert case.out.logprob_ids[0].tolist() == whole.out.logprob_ids[row].tolist()
        assert case.out.logprobs[0].tolist() == whole.out.logprobs[row].tolist()


def test_finish_codes(ops: CpuOps) -> None:
    logits = np.zeros((6, 100), np.float32)
    logits[:, 42] = 1
    logits[3, 7] = np.nan
    logits[4, 99] = np.inf
    case = make_case(6)
    slot = case.batch.slots  # of each row
    case.state.stop_ids[slot[0], MAX_STOP_IDS - 1] = 42
    case.state.max_position[slot[1]] = case.batch.positions[1] + 2
    case.state.finished[slot[2]] = LENGTH
    ops.sample(logits, case.batch, case.state, case.out)
    codes = [STOP, LENGTH, DONE_BEFORE, NOT_FINITE, NOT_FINITE, RUNNING]
    assert case.out.finish.tolist() == codes
    assert case.out.tokens.tolist() == [42, 42, -1, -1, -1, 42]
    assert case.state.finished[slot].tolist() == [STOP, LENGTH, LENGTH, NOT_FINITE, NOT_FINITE, 0]
    assert case.state.last_token[slot].tolist() == [42, 42, -7, -7, -7, 42]
    assert case.state.next_position[slot[5]] == case.batch.positions[5] + 1
    assert case.state.next_position[slot[2]] == -7


def test_all_logits_equal(ops: CpuOps) -> None:
    logits = np.full((2, 3001), -3.5, np.float32)
    fields = {"temperature": 1.0, "top_p": 0.5}
    ours, truth = sample(ops, logits, 2, **fields), sample(ReferenceOps(), logits, 2, **fields)
    assert ours.out.tokens.tolist() == truth.out.tokens.tolist()


# --- bias and penalties -------------------------------------------------------------------

ROWS = 6  # of a penalised step: the last two have no penalty


def penalise(case: Case, vocab: int, seed: int) -> None:
    """History, prompt lengths, windows, penalties and biases at random."""
    rng, state = np.random.default_rng(seed), case.state
    case.batch.positions[:] = [0, 1, 40, 99, CONTEXT - 1, 17]
    state.history[:] = rng.integers(-1, min(vocab + 3, 60), state.history.shape)
    state.prompt_tokens[:] = rng.integers(0, CONTEXT, ROWS)
    state.penalty_window[:] = rng.choice([0, 1, 7, 64, 1000], ROWS)
    running = case.batch.slots[: ROWS - 2]
    state.repetition_penalty[running] = rng.choice([0.5, 1.0, 1.3, 2.0], len(running))
    state.presence_penalty[running] = rng.choice([-1.0, 0.0, 0.7], len(running))
    state.frequency_penalty[running] = rng.choice([-0.3, 0.0, 0.45], len(running))
    for slot in case.batch.slots[:3]:
        count = int(rng.integers(1, min(vocab, 1024) + 1))
        state.bias_ids[slot, :count] = rng.permutation(vocab)[:count]
        state.bias_values[slot, :count] = rng.choice([-100.0, -1e9, 0.1, 3.0], count)
        state.bias_count[slot] = count


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("vocab", [5, 16, 37, 1000, 4096, 4097, 30011, 151936])
def test_penalties_follow_random_md(ops: CpuOps, isa: str, vocab: int, temperature: float) -> None:
    """The same token as in numpy for every size, and the same probabilities, reported raw."""
    for seed in range(4 if vocab < 10000 else 2):
        rng = np.random.default_rng(seed)
        logits = (rng.standard_normal((ROWS, vocab)) * 4).astype(np.float32)
        logits[2] = np.round(logits[2])
        cases = []
        for kind in (ops, ReferenceOps()):
            case = make_case(ROWS, temperature=temperature, logprobs=vocab % 21)
            penalise(case, vocab, seed)
            kind.sample(logits, case.batch, case.state, case.out)
            cases.append(case)
        ours, truth = cases
        np.testing.assert_array_equal(ours.out.tokens, truth.out.tokens)
        np.testing.assert_array_equal(ours.out.logprob_ids, truth.out.logprob_ids)
        np.testing.assert_allclose(ours.out.logprobs, truth.out.logprobs, rtol=1e-5, atol=2e-5)
        assert (ours.out.tokens >= 0).all()


def test_adjusted_logits_are_exact(ops: CpuOps, isa: str) -> None:
    """Bit for bit: against a rival, biased to just below, exactly at and just above each."""
    vocab, rival = 62, 61  # no history holds the rival
    case = make_case(ROWS)
    penalise(case, vocab, 11)
    state = case.state
    slot, position = int(case.batch.slots[3]), int(case.batch.positions[3]) + 1
    state.repetition_penalty[slot], state.frequency_penalty[slot] = 1.37, 0.21
    state.presence_penalty[slot], state.penalty_window[slot] = 0.113, 0
    state.bias_count[slot], state.bias_ids[slot, 0] = 1, rival
    case.batch.outputs = np.array([3], np.int32)
    values = np.random.default_rng(5).standard_normal(vocab).astype(np.float32) * 3
    values[rival] = 0.0
    expected = sampling.adjust(values, state, slot, position)
    assert np.count_nonzero(expected != values) > 20
    for token in range(rival):
        logits = np.where(np.isin(np.arange(vocab), (token, rival)), values, np.float32(-np.inf))
        for level, winner in [(-np.inf, token), (None, token), (np.inf, rival)]:
            value = expected[token]
            state.bias_values[slot, 0] = value if level is None else np.nextafter(value, level)
            ops.sample(logits[None], case.batch, state, case.out)
            assert case.out.tokens[0] == winner, (token, level)


def test_a_bias_can_ban_and_can_force(ops: CpuOps) -> None:
    logits = np.random.default_rng(2).standard_normal((2, 500), np.float32)
    best = logits.argmax(axis=1)
    case = make_case(2)
    case.state.bias_count[:] = 1
    slots = case.batch.slots
    case.state.bias_ids[slots, 0] = best[0], 77
    case.state.bias_values[slots, 0] = -100, 100
    ops.sample(logits, case.batch, case.state, case.out)
    second = np.argsort(-logits[0])[1]
    assert case.out.tokens.tolist() == [second, 77]


# --- log-probabilities --------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 5, 20, 21, 333, 4097, 50000])
def test_the_best_come_in_order(ops: CpuOps, isa: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = np.round(rng.standard_normal((4, vocab)) * 3, 1).astype(np.float32)  # many ties
    logits[3, rng.random(vocab) < 0.9] = -np.inf
    logits[3, vocab // 2] = 0.0
    case = sample(ops, logits, 4, logprobs=MAX_LOGPROBS, temperature=1.0)
    for row in range(4):
        order = [i for i in np.argsort(-logits[row], kind="stable") if np.isfinite(logits[row, i])]
        wanted = [int(case.out.tokens[row]), *order[:MAX_LOGPROBS]]
        ids = case.out.logprob_ids[row]
        assert ids.tolist() == wanted + [-1] * (1 + MAX_LOGPROBS - len(wanted))
        x = logits[row].astype(np.float64)
        expected = x[wanted] - np.log(np.exp(x).sum())
        np.testing.assert_allclose(case.out.logprobs[row, : len(wanted)], expected, atol=1e-5)
        assert not case.out.logprobs[row, len(wanted) :].any()


def test_who_wants_none_gets_none(ops: CpuOps) -> None:
    logits = np.random.default_rng(0).standard_normal((3, 100), np.float32)
    case = make_case(3)
    case.state.logprobs[case.batch.slots] = 0, -1, 2
    ops.sample(logits, case.batch, case.state, case.out)
    assert (case.out.logprob_ids >= 0).sum(axis=1).tolist() == [1, 0, 3]
    assert not case.out.logprobs[1].any()


# --- -inf and worse -----------------------------------------------------------------------


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("allowed", [1, 3, 700])
def test_minus_infinity_is_never_chosen(
    ops: CpuOps, isa: str, allowed: int, filters: dict[str, float]
) -> None:
    """A grammar leaves a few tokens; whole chunks of the row may hold none."""
    vocab = 20000
    rng = np.random.default_rng(allowed)
    logits = np.full((5, vocab), -np.inf, np.float32)
    for row in logits:
        row[rng.permutation(vocab)[:allowed]] = rng.standard_normal(allowed) * 5
    for temperature in (0.0, 0.7, 3.0):
        fields = {"temperature": temperature, **filters}
        ours, truth = sample(ops, logits, 5, **fields), sample(ReferenceOps(), logits, 5, **fields)
        assert ours.out.tokens.tolist() == truth.out.tokens.tolist()
        assert np.isfinite(logits[np.arange(5), ours.out.tokens]).all()


def test_not_finite(ops: CpuOps, isa: str) -> None:
    logits = np.zeros((6, 9000), np.float32)
    logits[0, 8999] = np.nan
    logits[1, 5000] = np.inf
    logits[2] = -np.inf
    logits[3, 1:] = -np.inf  # and the one that is left gets a bias beyond float32
    logits[4, :8999] = -np.inf
    logits[5] = np.nan
    for temperature in (0.0, 1.0):
        case = make_case(6, temperature=temperature)
        slot = case.batch.slots[3]
        case.state.bias_count[slot], case.state.bias_values[slot, 0] = 1, -np.inf
        ops.sample(logits, case.batch, case.state, case.out)
        bad = NOT_FINITE
        assert case.out.finish.tolist() == [bad, bad, bad, bad, RUNNING, bad]
        assert case.out.tokens.tolist() == [-1, -1, -1, -1, 8999, -1]
