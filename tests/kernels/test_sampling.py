"""The C++ sampler against random.md in plain numpy, and against the distribution itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from voltapile.kernels.cpu.ops import CpuOps
from voltapile.kernels.ops import (
    DONE_BEFORE,
    LENGTH,
    MAX_STOP_IDS,
    NOT_FINITE,
    RUNNING,
    STOP,
    Batch,
    SlotState,
    StepOutput,
)
from voltapile.kernels.reference.ops import ReferenceOps


@dataclass
class Case:
    """A step that samples one row for each slot."""

    batch: Batch
    state: SlotState
    out: StepOutput


def make_case(rows: int, **fields: object) -> Case:
    def ints(value: int) -> np.ndarray:
        return np.full(rows, value, np.int32)

    def floats(value: float) -> np.ndarray:
        return np.full(rows, value, np.float32)

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
    state = SlotState(
        last_token=ints(-7),
        next_position=ints(-7),
        finished=ints(0),
        max_position=ints(2**31 - 1),
        stop_ids=np.full((rows, MAX_STOP_IDS), -1, np.int32),
        temperature=floats(0),
        top_k=ints(0),
        top_p=floats(1),
        min_p=floats(0),
        seed=np.arange(rows, dtype=np.uint64) * np.uint64(0x123456789ABCDEF),
    )
    for name, value in fields.items():
        getattr(state, name)[:] = value
    return Case(batch, state, StepOutput(ints(-9), ints(-9), floats(-9)))


def sample(ops: CpuOps | ReferenceOps, logits: np.ndarray, rows: int, **fields: object) -> Case:
    case = make_case(rows, **fields)
    ops.sample(logits, case.batch, case.state, case.out)
    return case


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps(2, 1 << 20)


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
    ops: CpuOps, vocab: int, scale: float, temperature: float, filters: dict[str, float]
) -> None:
    rows = 5
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((rows, vocab)) * scale).astype(np.float32)
    logits[1] = np.round(logits[1])  # many equal ones
    fields = {"temperature": temperature, **filters}
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
    whole = sample(CpuOps(3, 1 << 16), logits, 6, temperature=1.0)
    alone = CpuOps(1, 1 << 16)
    for row in range(6):
        case = make_case(6, temperature=1.0)
        case.batch.outputs = np.array([row], np.int32)
        alone.sample(logits[row : row + 1], case.batch, case.state, case.out)
        assert case.out.tokens[0] == whole.out.tokens[row]
        assert case.out.logprobs[0] == whole.out.logprobs[row]


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
