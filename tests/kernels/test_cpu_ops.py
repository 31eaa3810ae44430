"""Each C++ Op against the numpy reference; replays, threads, company and CPU kinds change nothing.

Matrix products have tests of their own; here they stand in lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from voltapile.kernels.cpu import _cpu
from voltapile.kernels.cpu.ops import CpuOps, CpuWeight
from voltapile.kernels.ops import (
    Array,
    Batch,
    Ops,
    SlotState,
    StepOutput,
    slot_state,
    step_output,
)
from voltapile.kernels.reference.ops import ReferenceOps

ISAS = ("plain", "avx2", "avx512")
BEST = _cpu.isa()


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        _cpu.set_isa(request.param)
    except ValueError as missing:
        pytest.skip(str(missing))
    yield request.param
    _cpu.set_isa(BEST)


def make_ops(threads: int = 2) -> CpuOps:
    return CpuOps(threads, 1 << 26)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def vector(ops: Ops, values: np.ndarray) -> CpuWeight:
    return ops.weight(values.view(np.uint8), "F32", values.shape)


def matrix(ops: Ops, values: np.ndarray) -> CpuWeight:
    return ops.weight(values.view(np.uint8).reshape(-1), "F32", values.shape)


# --- elementwise ----------------------------------------------------------------------------


@pytest.mark.parametrize("cols", [1, 7, 16, 40, 64, 576, 4096])
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_rms_norm(isa: str, rows: int, cols: int) -> None:
    x, w = normal(rows, rows, cols) * 10, normal(cols, cols)
    ops, ref = make_ops(), ReferenceOps()
    ours = ops.rms_norm(x, vector(ops, w), 1e-5)
    np.testing.assert_allclose(ours, ref.rms_norm(x, vector(ref, w), 1e-5), rtol=2e-6, atol=1e-6)


def test_rms_norm_of_a_row_of_heads(isa: str) -> None:
    x, w = normal(0, 5, 3 * 24), normal(1, 24)
    ops = make_ops()
    heads = ops.rms_norm(x.reshape(5, 3, 24), vector(ops, w), 1e-6)
    np.testing.assert_array_equal(ops.rms_norm(x, vector(ops, w), 1e-6), heads.reshape(5, 72))


@pytest.mark.parametrize("cols", [7, 64])
def test_rms_norm_adds_to_a_residual(isa: str, cols: int) -> None:
    x, w, residual = normal(0, 5, cols), normal(1, cols), normal(2, 5, cols)
    ops = make_ops()
    expected = residual + ops.rms_norm(x, vector(ops, w), 1e-6)
    assert ops.rms_norm(x, vector(ops, w), 1e-6, add_to=residual) is residual
    np.testing.assert_allclose(residual, expected, rtol=1e-6, atol=1e-6)


def test_softcap() -> None:
    x = np.array([[0, 1e-3, 5, -30, 1e6, -np.inf, np.nan]], np.float32)
    expected = [[30 * math.tanh(float(v) / 30) for v in x[0]]]
    np.testing.assert_allclose(make_ops().softcap_(x.copy(), 30.0), expected, rtol=1e-6)
    np.testing.assert_allclose(ReferenceOps().softcap_(x.copy(), 30.0), expected, rtol=1e-6)


def test_rms_norm_of_heads() -> None:
    x, w = normal(0, 5, 3, 24), normal(1, 24)
    ops, ref = make_ops(), ReferenceOps()
    ours = ops.rms_norm(x, vector(ops, w), 1e-6)
    assert ours.shape == x.shape
    np.testing.assert_allclose(ours, ref.rms_norm(x, vector(ref, w), 1e-6), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["norm", "neox"])
@pytest.mark.parametrize(("head_dim", "pairs"), [(64, 32), (64, 16), (20, 10), (128, 64)])
def test_rope(head_dim: int, pairs: int, layout: str) -> None:
    positions = np.array([0, 1, 77, 4095, 131071], np.int32)
    inv_freq = (10000.0 ** (-np.arange(pairs) / pairs)).astype(np.float32)
    x = normal(0, 5, 3 * head_dim)
    ops, ref = make_ops(), ReferenceOps()
    angles = ops.rope_angles(positions, inv_freq, 1.25)
    theirs = ref.rope_angles(positions, inv_freq, 1.25)
    np.testing.assert_allclose(angles, theirs, atol=2e-7)
    ours = ops.rope_(x.copy(), angles, head_dim, layout)
    np.testing.assert_allclose(ours, ref.rope_(x.copy(), theirs, head_dim, layout), atol=3e-6)


def test_angles_are_the_cosine_of_the_float32_product() -> None:
    positions, inv_freq = np.array([131071], np.int32), np.array([0.7310586], np.float32)
    angle = np.float64(np.float32(131071) * inv_freq[0])
    angles = make_ops().rope_angles(positions, inv_freq, 1.0)
    expected = np.array([[[np.cos(angle), np.sin(angle)]]], np.float32)
    np.testing.assert_array_equal(angles, expected)


def test_gather_and_copy() -> None:
    x, index = normal(0, 9, 13), np.array([8, 0, 0, 3], np.int32)
    ops = make_ops(3)
    np.testing.assert_array_equal(ops.gather(x, index), x[index])
    taken = ops.copy(x)
    np.testing.assert_array_equal(taken, x)
    assert not np.shares_memory(taken, x)


def test_begin_takes_what_goes_on_from_its_slot() -> None:
    def ints(*values: int) -> Array:
        return np.array(values, np.int32)

    batch = Batch(ints(5, 6, 7), ints(2, 0, 1), ints(1, 2, 3), ints(4, 5, 6), ints(0, 1, 1), ints(),
                  ())  # fmt: skip
    state = make_state(3)
    state.last_token[:], state.next_position[:] = (100, 101, 102), (50, 51, 52)
    make_ops().begin(batch, state)
    assert batch.tokens.tolist() == [5, 100, 101]
    assert batch.positions.tolist() == [1, 50, 51]
    assert batch.rope_positions.tolist() == [4, 50, 51]
    assert (state.history[2, 1], state.history[0, 50], state.history[1, 51]) == (5, 100, 101)
    assert np.count_nonzero(state.history) == 3


def test_begin_writes_nothing_past_the_context() -> None:
    """A slot that has finished at its last position may still continue."""
    one = np.zeros(1, np.int32)
    for ops in (make_ops(), ReferenceOps()):
        state = make_state(2)
        state.last_token[:], state.next_position[:] = 7, 64
        ops.begin(Batch(one.copy(), one, one.copy(), one.copy(), one + 1, one, ()), state)
        assert not state.history.any()


def make_state(slots: int) -> SlotState:
    return slot_state(make_ops(), slots, 64)


# --- attention ------------------------------------------------------------------------------

# heads, kv heads, key dim, value dim, tokens of a page, pages of a slot
SHAPES = [
    (9, 3, 64, 64, 64, 10),
    (4, 2, 40, 24, 16, 40),
    (8, 1, 128, 80, 64, 12),
    (2, 2, 12, 20, 7, 80),
    (20, 1, 8, 8, 32, 9),
    (1, 1, 256, 256, 300, 3),
]
CACHES = [(shape, kv_type) for shape in SHAPES for kv_type in ("f32", "f16")]
CACHES += [(shape, "q8_0") for shape in (SHAPES[0], SHAPES[-1], (6, 2, 96, 32, 20, 30))]
SLOTS = 3


def rounded(x: np.ndarray, kv_type: str) -> Array:
    """x as a cache of that type gives it back."""
    if kv_type == "f32":
        return x
    if kv_type == "f16":
        return x.astype(np.float16).astype(np.float32)
    blocks = x.reshape(-1, 16)
    most, least, best = np.abs(blocks).max(axis=1, keepdims=True), np.inf, np.zeros_like(blocks)
    for i in range(16):  # scales that are tried: the one that leaves the least error
        scale = (most / (np.float32(127.4) - np.float32(0.5 * i))).astype(np.float16)
        step = scale.astype(np.float32)
        found = np.clip(np.rint(blocks * (1 / step)), -127, 127) * step
        off = ((blocks - found).astype(np.float64) ** 2).sum(axis=1, keepdims=True)
        best, least = np.where(off < least, found, best), np.minimum(off, least)
    return best.reshape(x.shape)


class Filled:
    """The same random keys and values in a cache of each ops, pages in random order."""

    def __init__(self, shape: tuple[int, ...], kv_type: str, *every: Ops) -> None:
        self.heads, kv_heads, self.key_dim, value_dim, page_tokens, pages = shape
        rng = np.random.default_rng(1)
        self.length = pages * page_tokens
        order = rng.permutation(SLOTS * pages) + 1
        self.table = order.reshape(SLOTS, pages).astype(np.int32)
        sizes = SLOTS * pages + 1, kv_heads, page_tokens, self.key_dim, value_dim
        self.caches = [ops.kv_cache(*sizes, kv_type, kv_type) for ops in every]
        self.head_map = [int(h) for h in rng.integers(0, kv_heads, self.heads)]
        positions = np.arange(self.length)
        for slot in range(SLOTS):
            k = normal(slot, self.length, kv_heads * self.key_dim)
            v = normal(slot + 9, self.length, kv_heads * value_dim)
            batch = self.batch(np.full(self.length, slot), positions)
            for ops, cache in zip(every, self.caches, strict=True):
                if isinstance(ops, ReferenceOps):
                    k, v = rounded(k, kv_type), rounded(v, kv_type)
                ops.store_kv(cache, k, v, batch, 0)

    def batch(self, slots: np.ndarray, positions: np.ndarray) -> Batch:
        none = np.zeros(0, np.int32)
        return Batch(none, slots.astype(np.int32), positions.astype(np.int32), none, none, none,
                     (self.table,))  # fmt: skip

    def some(self, tokens: int) -> tuple[np.ndarray, Batch]:
        """Queries: half of them a run of neighbours as in a prompt, the rest anywhere."""
        rng = np.random.default_rng(tokens)
        slots = np.sort(rng.integers(0, SLOTS, tokens))
        positions = rng.integers(0, self.length, tokens)
        run = (tokens + 1) // 2
        slots[:run] = 0
        positions[:run] = rng.integers(0, self.length - run + 1) + np.arange(run)
        return normal(tokens, tokens, self.heads * self.key_dim), self.batch(slots, positions)


@pytest.mark.parametrize(("shape", "kv_type"), CACHES, ids=str)
def test_attention(isa: str, shape: tuple[int, ...], kv_type: str) -> None:
    ops, ref = make_ops(3), ReferenceOps()
    filled = Filled(shape, kv_type, ops, ref)
    for tokens in (1, 2, 19, 50):
        q, batch = filled.some(tokens)
        for window, softcap in ((0, 0.0), (50, 0.0), (300, 2.0), (1, 0.0)):
            rest = batch, 0, filled.head_map, filled.key_dim**-0.5, window, softcap
            with ops.scope():
                ours = ops.attention(q, filled.caches[0], *rest)
                theirs = ref.attention(q, filled.caches[1], *rest)
                np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(("shape", "kv_type"), CACHES, ids=str)
def test_attention_bits_depend_on_nothing_else(
    isa: str, shape: tuple[int, ...], kv_type: str
) -> None:
    every = [make_ops(threads) for threads in (1, 2, 3, 7)]
    filled = Filled(shape, kv_type, *every)
    q, batch = filled.some(40)
    for window in (0, 270):
        rest = 0, filled.head_map, 0.2, window
        whole = [ops.attention(q, filled.caches[i], batch, *rest) for i, ops in enumerate(every)]
        for other in whole[1:]:
            np.testing.assert_array_equal(whole[0], other)
        for t in range(0, 40, 3):
            alone = filled.batch(batch.slots[t : t + 1], batch.positions[t : t + 1])
            one = every[2].attention(q[t : t + 1], filled.caches[2], alone, *rest)
            np.testing.assert_array_equal(one[0], whole[0][t])


def test_a_long_context_is_shared_by_threads() -> None:
    shape = (2, 1, 16, 16, 64, 600)
    every = [make_ops(threads) for threads in (1, 2, 5)]
    ref = ReferenceOps()
    filled = Filled(shape, "f32", *every, ref)
    for last in (38399, 20000, 16384, 16383):
        q, batch = normal(0, 1, 32), filled.batch(np.array([1]), np.array([last]))
        outs = [
            ops.attention(q, cache, batch, 0, [0, 0], 0.5)
            for ops, cache in zip([*every, ref], filled.caches, strict=True)
        ]
        np.testing.assert_array_equal(outs[0], outs[1])
        np.testing.assert_array_equal(outs[0], outs[2])
        np.testing.assert_allclose(outs[0], outs[3], atol=1e-5)


def test_a_token_that_is_not_finite_harms_no_other() -> None:
    ops = make_ops(2)
    filled = Filled(SHAPES[0], "f32", ops)
    q, batch = filled.some(9)
    clean = ops.attention(q, filled.caches[0], batch, 0, filled.head_map, 0.1).copy()
    q[4] = np.nan
    dirty = ops.attention(q, filled.caches[0], batch, 0, filled.head_map, 0.1)
    assert np.isnan(dirty[4]).all()
    others = np.arange(9) != 4
    np.testing.assert_array_equal(dirty[others], clean[others])


def test_pages_behind_the_window_are_not_read() -> None:
    """They may be another request's by now, and hold anything."""
    ops = make_ops(2)
    filled = Filled((4, 2, 16, 16, 16, 20), "f32", ops)
    cache, window = filled.caches[0], 20
    positions = np.arange(150, 163)
    q, batch = normal(0, 13, 64), filled.batch(positions * 0, positions)
    clean = ops.attention(q, cache, batch, 0, [0, 0, 1, 1], 0.3, window).copy()
    hidden = filled.table[0, : (150 - window) // 16]
    cache.keys.view(np.float32)[hidden] = np.nan
    cache.values.view(np.float32)[hidden] = np.nan
    again = ops.attention(q, cache, batch, 0, [0, 0, 1, 1], 0.3, window)
    np.testing.assert_array_equal(again, clean)


def test_halves_round_to_nearest_even_and_saturate(isa: str) -> None:
    values = np.array(
        [1.0, 1 + 2**-11, 1 + 3 * 2**-11, 2**-24, 2**-25, 3 * 2**-26, -6.1e-5, 65519, 1e9, -1e9,
         0.1, -0.0, 2**-14 - 2**-25, 1e-30, 333.333, 65504], np.float32)  # fmt: skip
    ops = make_ops(1)
    cache = ops.kv_cache(2, 1, 32, 16, 16, "f16", "f16")
    one = np.ones(1, np.int32)
    batch = Batch(one, one * 0, one * 0, one, one, one, (np.array([[1]], np.int32),))
    ops.store_kv(cache, values[None], values[None], batch, 0)
    expected = np.clip(values, -65504, 65504).astype(np.float16)
    stored = cache.values[1].view(np.float16)[:16]
    np.testing.assert_array_equal(stored.view(np.uint16), expected.view(np.uint16))
    out = ops.attention(np.zeros((1, 16), np.float32), cache, batch, 0, [0], 1.0)
    np.testing.assert_array_equal(out[0], expected.astype(np.float32) + 0)


def test_wrong_pages_do_not_reach_foreign_memory() -> None:
    ops = make_ops(1)
    cache = ops.kv_cache(2, 1, 16, 8, 8, "f32", "f32")
    table = np.array([[99, -1]], np.int32)
    one = np.ones(1, np.int32)
    for position in (0, 17, 5000, -3):
        batch = Batch(one, one * 0, one * position, one, one, one, (table,))
        ops.store_kv(cache, np.ones((1, 8), "f4"), np.ones((1, 8), "f4"), batch, 0)
    assert not cache.keys.any()
    assert not cache.values.any()


def test_copy_page() -> None:
    ops = make_ops(1)
    cache = ops.kv_cache(4, 2, 16, 8, 8, "f16", "f16")
    cache.keys[1], cache.values[1] = 3, 4
    ops.copy_page(cache, 1, 3)
    assert (cache.keys[3] == 3).all()
    assert (cache.values[3] == 4).all()
    assert not cache.keys[2].any()


# --- a small model ----------------------------------------------------------------------------


class Layer:
    """One block and a head, in every Op that a llama uses."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.table = matrix(ops, normal(0, 50, 64))
        self.norm, self.bias = vector(ops, normal(1, 64)), vector(ops, normal(2, 64))
        self.q, self.k, self.v, self.o = (matrix(ops, normal(3 + i, 64, 64) / 8) for i in range(4))
        self.gate, self.up = (matrix(ops, normal(8 + i, 96, 64) / 8) for i in range(2))
        self.down = matrix(ops, normal(10, 64, 96) / 8)
        self.cache = ops.kv_cache(9, 4, 16, 16, 16, "f32", "f32")
        self.inv_freq = (100.0 ** (-np.arange(8) / 8)).astype(np.float32)

    def logits(self, batch: Batch) -> Array:
        ops = self.ops
        x = ops.embed(self.table, batch.tokens)
        angles = ops.rope_angles(batch.rope_positions, self.inv_freq, 1.0)
        with ops.scope():
            y = ops.rms_norm(x, self.norm, 1e-5)
            q, k, v = ops.linears(y, (self.q, self.k, self.v), (self.bias, None, None))
            ops.rope_(q, angles, 16, "neox")
            ops.rope_(k, angles, 16, "neox")
            ops.store_kv(self.cache, k, v, batch, 0)
            a = ops.attention(q, self.cache, batch, 0, [0, 1, 2, 3], 0.25)
            ops.linear(a, self.o, self.bias, add_to=x)
            y = ops.glu(ops.rms_norm(x, self.norm, 1e-5), self.gate, self.up, "silu")
            ops.linear(y, self.down, add_to=x)
        return ops.linear(ops.gather(x, batch.outputs), self.table)

    def step(self, batch: Batch, state: SlotState, out: StepOutput) -> None:
        self.ops.reset_scratch()
        self.ops.begin(batch, state)
        self.ops.sample(self.logits(batch), batch, state, out)


def decode_batch() -> tuple[Batch, SlotState, StepOutput]:
    two = np.arange(2, dtype=np.int32)
    table = np.arange(1, 9, dtype=np.int32).reshape(2, 4)
    batch = Batch(two * 0, two.copy(), two * 0, two * 0, two * 0 + 1, two.copy(), (table,))
    state = make_state(2)
    state.last_token[:], state.temperature[1] = (3, 4), 1.0
    state.logprobs[:], state.frequency_penalty[0] = 3, 0.5
    return batch, state, step_output(make_ops(), 2)


def generate(layer: Layer, captured: bool, steps: int = 30) -> tuple[list[list[int]], Array]:
    batch, state, out = decode_batch()
    tokens = []
    if captured:
        with layer.ops.capture() as graph:
            layer.step(batch, state, out)
        assert state.last_token.tolist() == [3, 4], "recording must not run"
    for _ in range(steps):
        graph.replay() if captured else layer.step(batch, state, out)
        tokens.append(out.tokens.tolist())
    return tokens, out.logprobs


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_replay_equals_immediate(threads: int) -> None:
    tokens, logprobs = generate(Layer(make_ops(threads)), captured=False)
    replayed, same = generate(Layer(make_ops(threads)), captured=True)
    assert replayed == tokens
    np.testing.assert_array_equal(logprobs, same)
    truth, close = generate(Layer(ReferenceOps()), captured=False)
    assert tokens == truth
    np.testing.assert_allclose(logprobs, close, atol=1e-4)


def test_scratch_is_bounded_and_says_so() -> None:
    ops = CpuOps(1, 1024)
    x = np.ones((4, 32), np.float32)
    ops.copy(x)
    with ops.scope():
        ops.copy(x)
        with pytest.raises(MemoryError, match="512 bytes does not fit: 1024 of the planned 1024"):
            ops.copy(x)
    ops.copy(x)
    assert ops.scratch_peak == 1024
    ops.reset_scratch()
    ops.copy(x)


def test_weights_are_not_copied() -> None:
    ops, data = make_ops(1), normal(0, 4, 8)
    data.flags.writeable = False
    weight = matrix(ops, data)
    data.flags.writeable = True
    data[:] = np.arange(4, dtype=np.float32)[:, None]
    out = ops.embed(weight, np.array([2, 3], np.int32))
    assert out.tolist() == [[2] * 8, [3] * 8]


def test_vectors_of_half_floats() -> None:
    ops, values = make_ops(1), np.array([1.5, -2.25, 1e-4], np.float16)
    weight = ops.weight(values.view(np.uint8), "F16", (3,))
    np.testing.assert_array_equal(weight.vector, values.astype(np.float32))


def test_wrong_arrays_are_refused() -> None:
    ops, x = make_ops(1), normal(0, 4, 8)
    weight = vector(ops, normal(0, 8))
    with pytest.raises(TypeError):
        ops.rms_norm(x.astype(np.float64), weight, 1e-5)
    with pytest.raises(TypeError):
        ops.rms_norm(np.asfortranarray(x), weight, 1e-5)
    with pytest.raises(AssertionError):
        ops.rms_norm(normal(0, 4, 7), weight, 1e-5)
    with pytest.raises(AssertionError):
        ops.linear(x, weight)
    with pytest.raises(TypeError):
        ops.gather(x, np.zeros(2, np.int64))
    batch, state, out = decode_batch()
    with pytest.raises(TypeError):
        ops.begin(replace(batch, tokens=np.zeros(2, np.int64)), state)
    with pytest.raises(AssertionError):
        ops.sample(normal(0, 3, 10), batch, state, out)
    cache = ops.kv_cache(2, 1, 16, 8, 8, "f32", "f32")
    with pytest.raises(ValueError, match="head_map names kv head 1 of 1"):
        ops.attention(normal(0, 2, 8), cache, batch, 0, [1], 1.0)
    with pytest.raises(ValueError, match="cache type 'q9'"):
        ops.kv_cache(2, 1, 16, 8, 8, "q9", "f32")
    with pytest.raises(ValueError, match="heads of 40 are no multiple of 16"):
        ops.kv_cache(2, 1, 16, 64, 40, "f32", "q8_0")
