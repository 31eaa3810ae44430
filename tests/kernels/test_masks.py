"""Masks and forced tokens: the same choice in numpy and in C++, and never a token without a bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from voltapile.kernels.cpu import _cpu
from voltapile.kernels.cpu.ops import CpuOps
from voltapile.kernels.ops import NOT_FINITE, RUNNING, Batch, SlotState, StepOutput, slot_state
from voltapile.kernels.ops import step_output as made_output
from voltapile.kernels.reference.ops import ReferenceOps

ROWS = 4
BEST = _cpu.isa()


@pytest.fixture(params=["plain", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        _cpu.set_isa(request.param)
    except ValueError as missing:
        pytest.skip(str(missing))
    yield request.param
    _cpu.set_isa(BEST)


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps(2, 1 << 26)


def make(vocab: int, words: int | None = None) -> tuple[Batch, SlotState, StepOutput]:
    rows = np.arange(ROWS, dtype=np.int32)
    zero = np.zeros(ROWS, np.int32)
    batch = Batch(zero, rows[::-1].copy(), rows * 3, zero, zero, rows.copy(), ())
    size = 32 * words if words else vocab
    state = slot_state(ReferenceOps(), ROWS, 64, size)
    state.logprobs[:] = 2
    return batch, state, made_output(ReferenceOps(), ROWS)


def mask_of(allowed: np.ndarray, words: int) -> np.ndarray:
    bits = np.zeros(32 * words, bool)
    bits[: len(allowed)] = allowed[: 32 * words]
    return np.packbits(bits, bitorder="little").view(np.uint32)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("vocab", [5, 32, 33, 1000, 4097, 30011])
def test_the_choice_is_the_masks(
    ops: CpuOps, isa: str, vocab: int, temperature: float, penalty: float
) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((ROWS, vocab)) * 4).astype(np.float32)
    allowed = rng.random((ROWS, vocab)) < 0.1
    allowed[:, vocab // 2] = True
    found = []
    for kind in (ops, ReferenceOps()):
        batch, state, out = make(vocab)
        state.temperature[:], state.repetition_penalty[:] = temperature, penalty
        state.history[:] = np.random.default_rng(1).integers(0, vocab, state.history.shape)
        state.seed[:] = np.arange(ROWS)
        state.masked[1:] = 1
        for slot in range(1, ROWS):
            state.mask[slot] = mask_of(allowed[slot], state.mask.shape[1])
        kind.sample(logits, batch, state, out)
        found.append(out)
    ours, truth = found
    np.testing.assert_array_equal(ours.tokens, truth.tokens)
    np.testing.assert_array_equal(ours.logprob_ids, truth.logprob_ids)  # of all tokens
    for row, slot in enumerate(batch.slots[:-1]):
        assert allowed[slot, ours.tokens[row]]
    if temperature == 0 and penalty == 1:
        assert ours.tokens[-1] == logits[-1].argmax()  # no mask holds for slot 0


def test_tokens_beyond_the_mask_are_never_chosen(ops: CpuOps, isa: str) -> None:
    logits = np.zeros((ROWS, 100), np.float32)
    logits[:, 70] = 9
    for kind in (ops, ReferenceOps()):
        batch, state, out = make(100, words=2)
        state.masked[:], state.mask[:] = 1, 0xFFFFFFFF
        kind.sample(logits, batch, state, out)
        assert out.tokens.tolist() == [0] * ROWS


def test_an_empty_mask_is_an_error(ops: CpuOps, isa: str) -> None:
    for kind in (ops, ReferenceOps()):
        batch, state, out = make(100)
        state.masked[:2] = 1
        kind.sample(np.zeros((ROWS, 100), np.float32), batch, state, out)
        assert out.finish.tolist() == [RUNNING, RUNNING, NOT_FINITE, NOT_FINITE]


def test_a_forced_token(ops: CpuOps, isa: str) -> None:
    logits = np.random.default_rng(2).standard_normal((ROWS, 100)).astype(np.float32)
    for kind in (ops, ReferenceOps()):
        batch, state, out = make(100)
        state.forced[:2] = 7, 0
        state.masked[:1] = 1
        state.mask[0] = mask_of(np.arange(100) == 3, 4)
        kind.sample(logits, batch, state, out)
        assert out.tokens[2:].tolist() == [0, 7]
        assert out.tokens[:2].tolist() == logits[:2].argmax(axis=1).tolist()
        assert state.last_token[:2].tolist() == [7, 0]
