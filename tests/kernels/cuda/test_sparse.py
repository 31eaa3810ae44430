"""Attention to chosen blocks: the kernels' own source on the CPU, against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import sparse
from voltapile.kernels.cuda.chunks import max_shared
from voltapile.kernels.cuda.pages import kv_cache
from voltapile.kernels.families import INDEX_RING

from .attention_twin import signs, turned
from .emulated_families import EmulatedFamilies
from .emulation import has_compiler
from .test_families import PAGE, REF, SLOW, batch_of, device, normal, ops, weights_of  # noqa: F401

pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no g++")


@pytest.mark.parametrize(
    ("kv", "head"),
    [
        ("f16", 64),
        ("q8_0", 32),
        ("q8_0", 256),
        pytest.param("f16", 32, marks=SLOW),
        pytest.param("f16", 192, marks=SLOW),  # more than a lane has on its way at once
    ],
)
def test_sparse_attention(ops: Any, kv: str, head: int) -> None:  # noqa: F811
    """Chunks of prompts and single tokens of two slots, till more blocks are there than chosen."""
    block, dim, heads, top_k, map_ = 4, 32, 3, 64, (0, 0, 1, 0)
    pages = np.array([[3, 1, 4], [0, 2, 5]], np.int32)
    scale = min(0.2, 1.6 / head**0.5)
    mine, theirs = weights_of(ops, normal(1, dim))
    rope = (10000.0 ** (-np.arange(8) / 8)).astype(np.float32), 1.1
    own, truth = (each.index_cache(6, PAGE, dim, block) for each in (ops, REF))
    own_kv = kv_cache(ops, 6, 2, PAGE, head, head, kv, kv)
    true_kv = REF.kv_cache(6, 2, PAGE, head, head, "f32", "f32")
    at = [0, 0]
    for seed, counts in enumerate([(70, 3), (1, 1), (40, 37), (2, 6), (1, 90)]):
        slots = [slot for slot in (0, 1) for _ in range(counts[slot])]
        positions = [at[slot] + i for slot in (0, 1) for i in range(counts[slot])]
        at = [a + n for a, n in zip(at, counts, strict=True)]
        tokens = len(slots)
        batch = batch_of(slots, positions, pages=(pages,), generated=tokens if tokens < 9 else 0)
        there = device(ops, batch)
        keys, q = normal(seed, tokens, dim), normal(seed + 50, tokens, heads * dim)
        ops.index_store(own, ops.array(keys), mine, rope, there, 0, 1e-6)
        REF.index_store(truth, keys, theirs, rope, batch, 0, 1e-6)
        np.testing.assert_array_equal(ops.to_host(own.ring), truth.ring)
        np.testing.assert_allclose(ops.to_host(own.pooled), truth.pooled, atol=2e-6)
        ops.upload(own.pooled, truth.pooled)
        chosen = ops.choose_blocks(ops.array(q), own, there, 0, heads, top_k)
        expected = REF.choose_blocks(q, truth, batch, 0, heads, top_k)
        blocks = ops.to_host(chosen.blocks)
        for t, position in enumerate(positions):
            found = min((position + 1) // block, top_k // block)
            seen = (blocks[t, :found, None] * block + np.arange(block)).reshape(-1)
            tail = np.arange((position + 1) // block * block, position + 1)
            np.testing.assert_array_equal(np.concatenate([seen, tail]), expected[t])
        k, v = (np.float16(normal(seed + i, tokens, 2 * head)).astype(np.float32) for i in (7, 8))
        for slot, position, key, value in zip(slots, positions, k, v, strict=True):
            put(ops, own_kv, true_kv, pages[slot, position // PAGE], position % PAGE, key, value)
        query = normal(seed + 90, tokens, 4 * head)
        ours = ops.attention_to(chosen, ops.array(query), own_kv, there, 0, map_, scale)
        right = REF.attention_to(expected, query, true_kv, batch, 0, map_, scale)
        tolerance = 2e-3 if kv == "f16" else 2e-2  # queries and shares are halves
        tolerance *= max(1, head / 128)
        np.testing.assert_allclose(ops.to_host(ours), right, atol=tolerance)
        both = normal(seed + 91, tokens, 8 * head)  # gates lie beside queries; or alone
        _, late = ops.split_heads(ops.array(both), head)
        gate = REF.split_heads(both, head)[1]
        for own_gate in late, ops.array(gate):
            gated = ops.attention_to(
                chosen, ops.array(query), own_kv, there, 0, map_, scale, own_gate
            )
            opened = ops.to_host(ours) / (1 + np.exp(-gate))
            np.testing.assert_allclose(ops.to_host(gated), opened, atol=1e-6, rtol=1e-5)
    assert INDEX_RING % block == 0


@pytest.mark.parametrize(("block", "launches"), [(8, 1), (16, 2)])
def test_keys_of_short_rows(ops: Any, block: int, launches: int) -> None:  # noqa: F811
    """A key that a token of the step still reads is not overwritten in the launch that reads it."""
    dim, at = 32, 0
    pages = np.array([[3, 1, 4]], np.int32)
    mine, theirs = weights_of(ops, normal(1, dim))
    rope = (10000.0 ** (-np.arange(8) / 8)).astype(np.float32), 1.1
    own, truth = (each.index_cache(6, PAGE, dim, block) for each in (ops, REF))
    for seed, n in enumerate([8, 6, 6]):
        batch = batch_of([0] * n, list(range(at, at + n)), pages=(pages,), generated=n, long_rows=0)
        there, keys, at = device(ops, batch), normal(seed, n, dim), at + n
        before = len(ops.launched)
        ops.index_store(own, ops.array(keys), mine, rope, there, 0, 1e-6)
        assert len(ops.launched) - before == launches
        REF.index_store(truth, keys, theirs, rope, batch, 0, 1e-6)
        np.testing.assert_array_equal(ops.to_host(own.ring), truth.ring)
        np.testing.assert_allclose(ops.to_host(own.pooled), truth.pooled, atol=2e-6)


@pytest.mark.parametrize(("dim", "pairs", "heads"), [(32, 8, 5), (72, 36, 2), (256, 32, 4)])
def test_queries_and_keys_in_one_launch(
    ops: Any,  # noqa: F811
    dim: int,
    pairs: int,
    heads: int,
) -> None:
    block, pages = 4, np.array([[3, 1, 4]], np.int32)
    norms = [weights_of(ops, normal(i, dim)) for i in (1, 2)]
    rope = (10000.0 ** (-np.arange(pairs) / pairs)).astype(np.float32), 1.1
    own, truth = (each.index_cache(6, PAGE, dim, block) for each in (ops, REF))
    batch = batch_of([0] * 6, list(range(6)), pages=(pages,), generated=6, long_rows=0)
    angles = REF.rope_angles(batch.positions, *rope)
    q, keys, rest = normal(3, 6, heads * dim), normal(4, 6, dim), (0, 1e-6)
    made, before = (ops.array(q), ops.array(keys)), len(ops.launched)
    mine, theirs = zip(*norms, strict=True)
    found = ops.index_heads(own, made, mine, ops.array(angles), rope, device(ops, batch), *rest)
    assert len(ops.launched) - before == 1
    expected = REF.index_heads(truth, (q.copy(), keys), theirs, angles, rope, batch, *rest)
    np.testing.assert_allclose(ops.to_host(found), expected, atol=1e-5)
    np.testing.assert_array_equal(ops.to_host(own.ring), truth.ring)
    np.testing.assert_allclose(ops.to_host(own.pooled), truth.pooled, atol=3e-6)


@pytest.mark.parametrize(
    ("dim", "heads", "block"), [(32, 3, 4), pytest.param(128, 4, 4, marks=SLOW), (48, 2, 16)]
)
def test_scores_of_prompts(
    ops: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    dim: int,
    heads: int,
    block: int,
) -> None:
    """Three slots, of which two meet in a tile, and more keys than a block of threads takes."""
    monkeypatch.setattr(sparse, "MOST_WARPS", 2)
    width, chosen = 20 if block == 4 else 75, 5
    pages = np.random.default_rng(2).permutation(3 * width).reshape(3, width).astype(np.int32)
    pages[1, 2] = -1  # not there: its keys count as zeros
    cache = sparse.index_cache(ops, 3 * width, PAGE, dim, block)
    pooled = 3 * normal(3, *cache.pooled.shape)
    ops.upload(cache.pooled, pooled)
    slots = [0] * 17 + [2] * 20 + [1] * 3
    ends = (np.random.default_rng(4).random(len(slots)) * width * PAGE).astype(int)
    ends[:3] = width * PAGE - 1, width * PAGE - 2, chosen * block - 1  # the last one: all
    q, most = normal(5, len(slots), heads * dim), width * PAGE // block
    batch = device(ops, batch_of(slots, ends.tolist()))

    def scores_of(part: slice, is_prompt: bool) -> np.ndarray:
        where, table = (batch.slots[part], batch.positions[part]), ops.array(pages)
        found = ops.scratch((len(slots[part]), most))
        sparse.score(ops, ops.array(q[part]), cache, table, where, found, chosen, is_prompt)
        return ops.to_host(found)

    every = slice(0, len(slots))
    found, alike, later = (
        scores_of(*each) for each in ((every, True), (every, False), (slice(9, 40), True))
    )
    per_page = PAGE // block
    for t, (slot, end) in enumerate(zip(slots, ends, strict=True)):
        whole = np.arange((end + 1) // block)
        if len(whole) <= chosen:
            continue
        page = pages[slot, whole // per_page]
        keys = np.where(page[:, None] < 0, 0, pooled[page, whole % per_page]).astype(np.float64)
        right = np.maximum(q[t].reshape(heads, -1).astype(np.float64) @ keys.T, 0).sum(axis=0)
        for own in found, alike:
            np.testing.assert_allclose(own[t, : len(whole)], right, atol=2e-6 * np.abs(right).max())
        if t >= 9:
            np.testing.assert_array_equal(later[t - 9, : len(whole)], found[t, : len(whole)])


@pytest.mark.parametrize("generated", [0, 3])
def test_of_equal_scores_the_first(ops: Any, generated: int) -> None:  # noqa: F811
    """Scores are small whole numbers, and zeros where there are fewer positive ones than wanted."""
    width, dim, block, top_k = 70, 32, 4, 4 * 100
    pages = np.arange(width, dtype=np.int32)[None, ::-1].copy()
    random = np.random.default_rng(6)
    own, truth = (each.index_cache(width, PAGE, dim, block) for each in (ops, REF))
    truth.pooled[...] = random.integers(-1, 2, truth.pooled.shape)
    truth.pooled[..., 0] = random.random(truth.pooled.shape[:2]) < 0.05
    ops.upload(own.pooled, truth.pooled)
    q = np.float32(random.integers(-1, 2, (3, 2 * dim)))
    q[1:] = 0
    q[1, [0, dim]] = 1, -1
    batch = batch_of([0] * 3, [width * PAGE - 1] * 3, pages=(pages,), generated=generated)
    chosen = ops.choose_blocks(ops.array(q), own, device(ops, batch), 0, 2, top_k)
    blocks, expected = ops.to_host(chosen.blocks), REF.choose_blocks(q, truth, batch, 0, 2, top_k)
    for t in range(3):
        np.testing.assert_array_equal(blocks[t], expected[t][::block] // block)


def scores_like(kind: str, tokens: int, most: int) -> np.ndarray:
    random = np.random.default_rng(8)
    values = np.maximum(random.standard_normal((4, tokens, most), np.float32), 0).sum(axis=0)
    if kind == "few":
        values = np.float32(random.integers(0, 5, values.shape)) / 3
    if kind == "alike":  # sign, exponent and the first bits: more than are kept aside
        values = 1 + values / 2**11
    if kind == "equal":
        values[:] = 0.7
    if kind == "zeros":  # fewer are positive than are wanted
        values[random.random(values.shape) < 0.999] = 0
    if kind == "tiny":  # of the first digit that is 0
        values *= np.float32(1e-40)
    if kind == "last":  # all that is large lies at the end
        values[:, : most - most // 16] *= np.float32(0.01)
    return values.astype(np.float32)


@pytest.mark.parametrize("kind", ["plain", "few", "alike", "equal", "zeros", "tiny", "last"])
@pytest.mark.parametrize("arch", [70, 80, 90])
def test_choice_of_scores(folder: Path, arch: int, kind: str) -> None:
    """Tokens of different lengths: of one more than wanted, of all, of so few that all are."""
    kernels, chosen, most = EmulatedFamilies(arch, folder, max_shared(arch)), 512, 9008
    check_choice(kernels, scores_like(kind, 5, most), [513, most, 512, 4100, 3], chosen)


def test_choice_of_many_scores(folder: Path) -> None:
    kernels = EmulatedFamilies(90, folder, max_shared(90))
    for kind in ("plain", "alike"):
        check_choice(kernels, scores_like(kind, 1, 65536), [65536], 512)


def check_choice(kernels: Any, scores: np.ndarray, counts: list[int], chosen: int) -> None:
    """counts: scores of each token; those behind must not matter."""
    shift = 2
    positions = np.array(counts, np.int32) * (1 << shift) + 1
    for row, count in zip(scores, counts, strict=True):
        row[count:] = np.inf
    blocks = kernels.scratch((len(scores), chosen), np.int32)
    sparse.choose(kernels, kernels.array(scores), kernels.array(positions), blocks, shift)
    found = kernels.to_host(blocks)
    for own, row, count in zip(found, scores, counts, strict=True):
        best = np.sort(np.argsort(-row[:count], kind="stable")[:chosen])
        np.testing.assert_array_equal(own[: len(best)], best)


def put(
    kernels: Any, own: Any, truth: Any, page: int, row: int, key: np.ndarray, value: np.ndarray
) -> None:
    """A token's keys and values, as attention_kv.cuh tells where they lie."""
    for cache, array, values in ((own.keys, truth.keys, key), (own.values, truth.values, value)):
        array[page, row] = values.reshape(2, -1)
        place = cache[page : page + 1]
        raw = kernels.to_host(place).reshape(2, -1)
        for head, x in enumerate(values.reshape(2, -1)):
            is_half = own.key_type == "f16"
            rows = raw[head][: PAGE * len(x) * (1 + is_half)].reshape(PAGE, -1)
            plain = turned(rows, kernels.arch)
            if is_half:
                plain.view(np.float16)[row] = x
            else:
                runs = x.reshape(-1, 16)
                scale = np.float16(np.abs(runs).max(axis=1) / 127)
                q = np.round(runs / scale.astype(np.float32)[:, None]).astype(np.int8)
                plain[row] = q.reshape(-1).view(np.uint8) ^ signs(kernels.arch)
                raw[head][PAGE * len(x) :].view(np.float16).reshape(PAGE, -1)[row] = scale
            rows[:] = turned(plain, kernels.arch)
        kernels.upload(place, raw)
