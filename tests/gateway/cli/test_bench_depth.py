"""Caches filled for a bench hold something everywhere, and leave the slot free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.gateway.cli.bench_depth import fill_caches
from voltapile.workers.engine import Engine
from voltapile.workers.protocol import Row, Sampling, Step, Want

DEPTH = 200


def answer(engine: Engine, pages: list[list[int]]) -> list[Any]:
    """Log-probabilities after a token behind DEPTH positions that nobody computed."""
    row = Row(slot=1, start=DEPTH, tokens=np.array([50], np.int32), sample=True, pages=pages)
    row.sampling, row.want = Sampling(), Want(logprobs=3)
    result = engine.run(Step(id=0, rows=[row]))
    engine.run(Step(id=1, release=[1]))
    return list(result.rows[0].logprobs)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_what_is_filled_is_read(mini: Path, engine_for: Callable[..., Engine], model: str) -> None:
    engine = engine_for(mini / model / "model-f16.gguf", "cpu", batch_tokens=64)
    pages = [[1 + i % (group.pages - 1) for i in range(4)] for group in engine.plan.caches]
    empty = answer(engine, pages)
    fill_caches(engine, 1, pages, DEPTH)
    assert engine.caches.used[0][1] == 0, "the slot is free"
    filled = answer(engine, pages)
    assert np.isfinite([pair[1] for pair in filled[0]]).all()
    assert filled != empty
    assert answer(engine, pages) == filled


def test_every_position_counts(mini: Path, engine_for: Callable[..., Engine]) -> None:
    """Also the last one, in a chunk that is shorter."""
    engine = engine_for(mini / "llama/model-f16.gguf", "cpu", batch_tokens=64)
    pages, found = [[1, 2, 3, 4]], []
    for depth in (DEPTH - 1, DEPTH, DEPTH):
        fill_caches(engine, 1, pages, depth)
        found.append(answer(engine, pages))
    assert found[0] != found[1]
    assert found[1] == found[2]


def test_blocks_have_keys(mini: Path, engine_for: Callable[..., Engine]) -> None:
    """Of a layer that chooses blocks: random ones, or it would choose the first."""
    engine = engine_for(mini / "qwen4exp/model-f16.gguf", "cpu", batch_tokens=64)
    fill_caches(engine, 1, [[1, 2, 3, 4]], DEPTH)
    indexes = [layer.index for layer in engine.caches.layers if layer.index is not None]
    assert indexes
    for index in indexes:  # pooled [page, dimension, block]
        found = index.pooled[1:5].any(axis=1).reshape(-1)
        assert found.tolist() == [i < DEPTH // index.block for i in range(len(found))]
