"""The row-wise kernels' and the sampler's own source, run on the CPU, against their numpy twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import rows, sampling, tiles
from voltapile.kernels.cuda.chunks import REPACKED
from voltapile.kernels.cuda.launch import CudaWeight
from voltapile.kernels.cuda.repack import repacked
from voltapile.kernels.ops import Batch, SlotState, StepOutput, slot_state, step_output
from voltapile.kernels.reference.ops import ReferenceOps
from voltapile.shm.formats import format_of

from .emulation import EmulatedOps, has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no g++")
REF = ReferenceOps()


@pytest.fixture(scope="module")
def ops(folder: Path) -> EmulatedOps:
    return EmulatedOps(70, folder, 96 << 10)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def vector(ops: EmulatedOps, values: np.ndarray) -> CudaWeight:
    return ops.weight(values, "F32", values.shape)


def true_vector(values: np.ndarray) -> Any:
    return REF.weight(values.view(np.uint8), "F32", values.shape)


@pytest.mark.parametrize(
    ("type_name", "vocab"),
    [
        *((name, 7) for name in ("F32", "F16", "Q4_K", "Q5_K", "Q6_K", "Q8_0")),
        *((name, 7) for name in ("IQ2_XS", "MXFP4", "NVFP4")),
        *((name, 32) for name in tiles.FORMATS),
    ],
)
def test_embed(ops: EmulatedOps, type_name: str, vocab: int) -> None:
    kind = format_of(type_name)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (vocab * 512 // kind.block_len, kind.block_bytes), np.uint8)
    data[:, 1::2] &= 0xBB  # no float16 is infinite
    if type_name == "F32":
        data = normal(0, vocab, 512).view(np.uint8)
    tokens = np.array([vocab - 1, 0, 0, 3], np.int32)
    raw, stored = data.reshape(-1), REPACKED.get(type_name, type_name)
    if stored != type_name:
        raw = np.concatenate(list(repacked(raw, type_name)))
    table = ops.weight(raw, stored, (vocab, 512))
    assert table.is_tiled == (vocab == 32)
    ours = ops.to_host(rows.embed(ops, table, ops.array(tokens), 1.5))
    theirs = REF.embed(REF.weight(data.reshape(-1), type_name, (vocab, 512)), tokens, 1.5)
    np.testing.assert_array_equal(ours, theirs)
    bad = ops.to_host(rows.embed(ops, table, ops.array(np.array([vocab, -1], np.int32))))
    assert np.isnan(bad).all()


def test_the_first_kernels_of_a_step_wait_for_all_before() -> None:
    """So attention may read positions, tables and older keys before its predecessor has ended."""
    assert not any(each.waits for each in (sampling.BEGIN, rows.ANGLES, *rows.EMBED.values()))


@pytest.mark.parametrize("cols", [1, 7, 64, 512, 516, 577, 4096])
def test_rms_norm(ops: EmulatedOps, cols: int) -> None:
    x, w, old = normal(1, 3, cols) * 10, normal(2, cols), normal(3, 3, cols)
    theirs = REF.rms_norm(x, true_vector(w), 1e-5)
    ours = ops.to_host(rows.rms_norm(ops, ops.array(x), vector(ops, w), 1e-5))
    np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6)
    added = rows.rms_norm(ops, ops.array(x), vector(ops, w), 1e-5, ops.array(old))
    np.testing.assert_allclose(ops.to_host(added), old + theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("layout", ["norm", "neox"])
@pytest.mark.parametrize(("head_dim", "pairs"), [(64, 32), (64, 16), (20, 10)])
def test_rope(ops: EmulatedOps, head_dim: int, pairs: int, layout: str) -> None:
    positions = np.array([0, 1, 4095, 131071], np.int32)
    inv_freq = (10000.0 ** (-np.arange(pairs) / pairs)).astype(np.float32)
    x = normal(0, 4, 3 * head_dim)
    angles = rows.rope_angles(ops, ops.array(positions), inv_freq, 1.25)
    theirs = REF.rope_angles(positions, inv_freq, 1.25)
    np.testing.assert_allclose(ops.to_host(angles), theirs, atol=2e-7)
    ours = ops.to_host(rows.rope_(ops, ops.array(x), angles, head_dim, layout))
    np.testing.assert_allclose(ours, REF.rope_(x.copy(), theirs, head_dim, layout), atol=3e-6)


def test_gather_and_softcap(ops: EmulatedOps) -> None:
    x, index = normal(0, 5, 300), np.array([4, 0, 0], np.int32)
    taken = rows.gather(ops, ops.array(x), ops.array(index))
    np.testing.assert_array_equal(ops.to_host(taken), x[index])
    capped = ops.to_host(rows.softcap_(ops, ops.array(x), 0.5))
    np.testing.assert_allclose(capped, 0.5 * np.tanh(x / 0.5), rtol=3e-6, atol=1e-7)


# --- the ends of a step -------------------------------------------------------------------------


def copied(record: Any, copy: Callable[[Any], Any]) -> Any:
    """A record of arrays with each of them copied."""
    arrays = {each.name: getattr(record, each.name) for each in fields(record)}
    return replace(
        record, **{k: copy(v) if isinstance(v, np.ndarray) else v for k, v in arrays.items()}
    )


def a_step(vocab: int, seed: int) -> tuple[Batch, SlotState, StepOutput]:
    """Rows of all kinds: filtered, penalised, biased, greedy, masked, forced, finished."""
    rng, count, context = np.random.default_rng(seed), 6, 40
    order = np.arange(count, dtype=np.int32)
    tokens, ropes, continues = np.zeros((3, count), np.int32)
    batch = Batch(tokens, order[::-1].copy(), order * 5, ropes, continues, order, ())
    state, out = slot_state(REF, count, context), step_output(REF, count)
    state.seed[:] = rng.integers(0, 2**63, count)
    state.temperature[:] = 0, 0.7, 1, 1, 3, 0.2
    state.top_k[:] = 0, 5, 0, 40, 0, 3
    state.top_p[:] = 1, 1, 0.8, 0.9, 1, 0.5
    state.min_p[:] = 0, 0, 0, 0.02, 0.1, 0
    state.logprobs[:] = 3, -1, 0, 20, 5, 1
    state.history[:] = rng.integers(-1, vocab + 2, state.history.shape)
    state.prompt_tokens[:] = rng.integers(0, 20, count)
    state.penalty_window[:] = 0, 0, 4, 7, 0, 0
    state.repetition_penalty[:] = 1, 1.3, 1, 0.7, 1, 1
    state.frequency_penalty[:] = 0, 0.4, 0, 0.1, 0, 0
    state.presence_penalty[3] = -0.5
    state.bias_count[:] = 0, 0, 2, 0, 1, 0
    state.bias_ids[:, 1], state.bias_values[:, :2] = 1, (2.5, -1e9)
    state.max_position[4] = 6
    state.masked[2:4], state.mask[2], state.mask[3, :9] = 1, 0xAAAAAAAA, 0x0F0F0F0F
    state.forced[1] = 2
    state.finished[5] = 2
    return batch, state, out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("vocab", [5, 60, 1500, 5000])
def test_sample(ops: EmulatedOps, vocab: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "THREADS", 64)
    logits = normal(seed, 6, vocab) * 3
    logits[1] = np.round(logits[1])  # many equal ones
    if seed == 2:
        logits[0, 3], logits[2, 1:] = np.nan, -np.inf
    batch, state, out = a_step(vocab, seed)
    mine, my_state, my_out = (copied(each, ops.array) for each in (batch, state, out))
    sampling.sample(ops, ops.array(logits), mine, my_state, my_out)
    REF.sample(logits, batch, state, out)
    for name in ("tokens", "finish", "logprob_ids"):
        np.testing.assert_array_equal(ops.to_host(getattr(my_out, name)), getattr(out, name))
    np.testing.assert_allclose(ops.to_host(my_out.logprobs), out.logprobs, rtol=1e-5, atol=2e-5)
    for name in ("last_token", "next_position", "finished"):
        np.testing.assert_array_equal(ops.to_host(getattr(my_state, name)), getattr(state, name))


def test_begin(ops: EmulatedOps) -> None:
    batch, state, _ = a_step(60, 0)
    batch.continues[::2] = 1
    state.last_token[:], state.next_position[:] = np.arange(6) + 100, np.arange(6) * 8
    mine, my_state = copied(batch, ops.array), copied(state, ops.array)
    sampling.begin(ops, mine, my_state)
    REF.begin(batch, state)
    for name in ("tokens", "positions", "rope_positions"):
        np.testing.assert_array_equal(ops.to_host(getattr(mine, name)), getattr(batch, name))
    np.testing.assert_array_equal(ops.to_host(my_state.history), state.history)
