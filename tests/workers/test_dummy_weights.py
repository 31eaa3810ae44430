"""Random weights for measurements: a model of them computes on and on, as one of a file does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.gateway.cli.bench_load import Load
from voltapile.kernels.reference.families import ReferenceFamilyOps
from voltapile.shm.gguf import Gguf
from voltapile.workers.engine import Engine


class DummyOps(ReferenceFamilyOps):
    """With random weights as kernels/cuda/dummy.py makes them, as float32."""

    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(0)

    def dummy_weight(
        self, type_name: str, shape: tuple[int, ...], around: tuple[float, float] | None = None
    ) -> Any:
        middle, size = around or ((1.0, 0.1) if len(shape) == 1 else (0.0, 0.02))
        values = self.random.uniform(middle - size, middle + size, shape).astype(np.float32)
        return self.weight(values.reshape(-1).view(np.uint8), "F32", shape)


@pytest.mark.parametrize("model", ["qwen3moe", "qwen35", "qwen35moe", "qwen3next", "qwen4exp"])
def test_logits_stay_finite(mini: Path, plan_for: Callable[..., Any], model: str) -> None:
    """Behind 128 tokens, too: a state that grew would be infinite by then. Load checks."""
    path = mini / model / "model-f16.gguf"
    with Gguf.open(path) as gguf:
        engine = Engine(plan_for(path, context=512), DummyOps(), gguf, is_dummy=True)
        engine.load()
        prompts = np.random.default_rng(1).integers(40, 400, (1, 128))
        for depth in (0, 128):
            Load(engine, 1, 4, 0.0, depth).run(prompts)
