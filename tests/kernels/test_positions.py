"""Attention over positions that ranks share out: what is joined is what one rank computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cpu.families import CpuFamilyOps
from voltapile.kernels.ops import Batch
from voltapile.kernels.positions import Runs
from voltapile.kernels.reference.families import ReferenceFamilyOps

PARTS, RUN, DIM, HEAD_MAP = 3, 8, 32, (0, 0, 1, 1, 1)
KV_HEADS, SCALE = 2, DIM**-0.5


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Any:
    if request.param == "cpu":
        return CpuFamilyOps(2, 16 << 20)
    return ReferenceFamilyOps()


def batch_of(slots: list[int], positions: list[int], tables: np.ndarray) -> Batch:
    columns = np.asarray(slots, np.int32), np.asarray(positions, np.int32)
    tokens = np.zeros(len(slots), np.int32)
    return Batch(tokens, columns[0], columns[1], columns[1], tokens, tokens[:0], (tables,))


def values(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def steps() -> list[tuple[list[int], list[int]]]:
    """A prompt of two slots, then single tokens of both."""
    first = [0] * 19 + [1] * 3, [*range(19), *range(3)]
    return [first, *(([0, 1], [19 + i, 3 + i]) for i in range(30))]


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_the_parts_give_the_whole(ops: Any, softcap: float) -> None:
    # Pages of all ranks together, the trash page and the padding slot's table among them.
    tables = np.array([[4, 2, 5], [1, 3, 0], [0, 0, 0]], np.int32)
    whole = ops.kv_cache(6, KV_HEADS, PARTS * RUN, DIM, DIM, "f32", "f32")
    parts = [ops.kv_cache(6, KV_HEADS, RUN, DIM, DIM, "f32", "f32") for _ in range(PARTS)]
    for seed, (slots, positions) in enumerate(steps()):
        ops.reset_scratch()
        batch, count = batch_of(slots, positions, tables), len(slots)
        q = values(seed, count, len(HEAD_MAP) * DIM)
        k, v = (values(seed + 100 * i, count, KV_HEADS * DIM) for i in (1, 2))
        ops.store_kv(whole, k, v, batch, 0)
        expected = ops.attention(q, whole, batch, 0, HEAD_MAP, SCALE, softcap=softcap)
        seen = []
        for part, cache in enumerate(parts):
            kept = ops.kept(batch, Runs(part, PARTS, RUN))
            ops.store_kv(cache, k, v, kept.stored, 0)
            seen.append(ops.attention_part(q, cache, kept.seen, 0, HEAD_MAP, SCALE, softcap))
        everyone = np.concatenate([weights for _, weights in seen], axis=1)
        joined = sum(ops.weigh_(o, weights, everyone) for o, weights in seen)
        np.testing.assert_allclose(joined, expected, atol=2e-6)
        assert np.isneginf(seen[2][1]).any() == any(p < 2 * RUN for p in positions)


def test_columns_are_taken(ops: Any) -> None:
    x = values(1, 3, 20)
    np.testing.assert_array_equal(ops.take(x, 7, 5), x[:, 5:12])
