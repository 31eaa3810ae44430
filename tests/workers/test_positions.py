"""Keys and values that ranks share out by position: the tokens of one rank, and less memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.topology.plan import PlanError
from voltapile.workers.protocol import Row

from .test_family_ranks import compare

Make = Callable[..., Any]
SPLIT = {"kv_split": "positions", "split_mode": "tensor"}


@pytest.mark.parametrize(
    ("model", "backend", "ranks"),
    [
        ("qwen3", "cpu", 2),
        ("llama", "cpu", 3),
        ("qwen35", "cpu", 3),
        ("qwen3moe", "cpu", 4),
        ("qwen2", "reference", 2),
        ("qwen35", "reference", 2),
    ],
)
def test_tokens(
    mini: Path, engine_for: Make, ranks_for: Make, drive: Make, model: str, backend: str, ranks: int
) -> None:
    """Prompts end inside of a rank's first run, and behind the last one's."""
    path = mini / model / "model-f16.gguf"
    compare(engine_for, ranks_for, drive, path, backend, ranks=ranks, **SPLIT)


def test_a_rank_keeps_a_part_of_every_context(mini: Path, plan_for: Make) -> None:
    path = mini / "qwen3" / "model-f16.gguf"
    whole, split = (plan_for(path, "cpu", ranks=4, kv_split=how) for how in ("", "positions"))
    heads = [rank.share.kv_heads for rank in split.ranks]
    assert heads == [(0, whole.caches[0].kv_heads)] * 4
    assert [rank.share.kv_runs.part for rank in split.ranks] == [0, 1, 2, 3]
    assert split.caches[0].page_tokens == 4 * whole.caches[0].page_tokens
    assert {sum(rank.page_bytes) for rank in split.ranks} == {split.caches[0].page_bytes // 4}


def test_what_is_kept_can_be_searched(mini: Path, ranks_for: Make, drive: Make) -> None:
    """On the rank that has the slot's positions, and on one that has none."""
    group = ranks_for(mini / "qwen3" / "model-f16.gguf", "cpu", ranks=2, **SPLIT)
    driver = drive(group)
    driver.step(driver.start(0, list(range(5, 12)), 8))
    last = Row(slot=0, start=6, tokens=np.array([11], np.int32))
    for engine in group.engines:
        assert engine.search._kept(last).startswith("after the keys and values of layer")


@pytest.mark.parametrize(
    ("model", "backend", "options", "reason"),
    [
        ("gemma3", "cpu", {"ranks": 2}, "do not look at all positions"),
        ("qwen4exp", "cpu", {"ranks": 2}, "do not look at all positions"),
        ("qwen3", "cpu", {"ranks": 12, "split_mode": "tensor"}, "more ranks"),
        ("qwen3", "cpu", {"kv_split": "pages"}, "expected heads or positions"),
    ],
)
def test_refusals(
    mini: Path, plan_for: Make, model: str, backend: str, options: Any, reason: str
) -> None:
    with pytest.raises(PlanError, match=reason):
        plan_for(mini / model / "model-f16.gguf", backend, **{"kv_split": "positions", **options})
