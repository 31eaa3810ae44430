"""An embedding in host memory that GPUs read: the tokens are those of one in VRAM, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from voltapile.gateway.cli.bench_ranks import open_ranks
from voltapile.workers.engine import open_engine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPT = list(range(30, 130))


@pytest.fixture(autouse=True)
def count() -> int:
    pytest.importorskip("cupy")
    from voltapile.kernels.cuda.device import device_count

    if not device_count():
        pytest.skip("no GPU here")
    return device_count()


@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_one_gpu(
    mini: Path, plan_for: Callable[..., Any], drive: Callable[..., Any], model: str
) -> None:
    path, found = mini / model / "model-f16.gguf", []
    for place in ("vram", "pinned"):
        plan = plan_for(path, "cuda", split_mode="none", overrides=[f"embed={place}"])
        assert bool(plan.shared) == (place == "pinned")
        with open_engine(plan) as engine:
            found.append(drive(engine).generate(PROMPT, 24))
    assert found[0] == found[1]


@pytest.mark.multigpu
def test_two_gpus(
    mini: Path, plan_for: Callable[..., Any], drive: Callable[..., Any], count: int
) -> None:
    if count < 2:
        pytest.skip("one GPU here")
    path, found = mini / "qwen3/model-f16.gguf", []
    for options in ({}, {"overrides": ["embed=vram"]}):
        plan = plan_for(path, "cuda", ranks=2, split_mode="tensor", **options)
        assert bool(plan.shared) != bool(options)
        with open_ranks(plan) as ranks:
            found.append(drive(ranks).generate(PROMPT, 24))
    assert found[0] == found[1]
