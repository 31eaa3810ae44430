"""Several ranks give the tokens of one, by parts of each matrix and by layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.topology.plan import PlanError

Make = Callable[..., Any]
MINI = ("llama", "qwen2", "qwen3", "gemma3")
IDS = np.random.default_rng(4).integers(0, 640, 90).tolist()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("model", MINI)
def test_tensor_mode(
    mini: Path, engine_for: Make, ranks_for: Make, drive: Make, model: str, ranks: int, backend: str
) -> None:
    path = mini / model / "model-f16.gguf"
    alone = engine_for(path, backend)
    group = ranks_for(path, backend, ranks=ranks, split_mode="tensor", threads=1)
    ids = np.asarray(IDS, np.int32)
    expected = np.concatenate(list(alone.prompt_logits(ids)))
    found = np.concatenate(list(group.prompt_logits(ids)))
    assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max()
    assert drive(group).generate(IDS, 12) == drive(alone).generate(IDS, 12)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("model", MINI)
def test_layer_mode(
    mini: Path, engine_for: Make, ranks_for: Make, drive: Make, model: str, ranks: int, backend: str
) -> None:
    """The very bits: nothing is summed in another order."""
    path = mini / model / "model-f16.gguf"
    try:
        group = ranks_for(path, backend, ranks=ranks, split_mode="layer", threads=1)
    except PlanError as error:
        pytest.skip(str(error))
    alone = engine_for(path, backend)
    ids = np.asarray(IDS, np.int32)
    expected = np.concatenate(list(alone.prompt_logits(ids)))
    np.testing.assert_array_equal(np.concatenate(list(group.prompt_logits(ids))), expected)
    assert drive(group).generate(IDS, 12, chunk=64) == drive(alone).generate(IDS, 12)


@pytest.mark.parametrize("mode", ["single", "tensor", "layer"])
@pytest.mark.parametrize("model", MINI)
def test_memory_is_as_planned(mini: Path, ranks_for: Make, model: str, mode: str) -> None:
    options = {} if mode == "single" else {"ranks": 2, "split_mode": mode}
    group = ranks_for(mini / model / "model-f16.gguf", "cpu", context=1024, **options)
    for rank, engine in zip(group.plan.ranks, group.engines, strict=True):
        memory = engine.memory()
        assert set(memory) | {"reserve"} >= {name for name, size in rank.memory.items() if size}
        for purpose, (planned, allocated) in memory.items():
            assert allocated <= planned * 1.02, purpose
        planned, allocated = map(sum, zip(*memory.values(), strict=True))
        assert allocated == pytest.approx(planned, rel=0.02)
