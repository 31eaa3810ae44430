"""Two GPUs, a process each: the tokens of the goldens, by parts of each matrix and by layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.gateway.cli.bench_ranks import open_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu, pytest.mark.timeout(300)]

MODELS = ("llama", "qwen2", "qwen3", "gemma3")
FAMILIES = ("qwen3moe", "qwen3next", "qwen35", "qwen35moe", "qwen4exp")
EXPERTS = tuple(model for model in FAMILIES if model != "qwen35")
# Margin of a golden's greedy token under which another may win; of a model with experts more, since
# one that is chosen by a hair changes a token by more than rounding.
TIE, FAMILY_TIE = 1e-3, 2e-2


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    pytest.importorskip("cupy")
    from voltapile.kernels.cuda.device import device_count

    if device_count() < 2:
        pytest.skip("one GPU or none here")


def check(folder: Path, plan: Any, drive: Callable[..., Any], tie: float) -> None:
    prompts = json.loads((folder / "golden.json").read_text())["prompts"]
    stored = np.load(folder / "golden.npz")
    assert [rank.device for rank in plan.ranks] == ["cuda:0", "cuda:1"]
    with open_ranks(plan) as ranks:
        for prompt, ids in prompts.items():
            expected = stored[f"{prompt}.greedy"].tolist()
            close = np.flatnonzero(stored[f"{prompt}.greedy_margin"] < tie)
            end = int(close[0]) if len(close) else len(expected)
            assert drive(ranks).generate(ids, len(expected))[:end] == expected[:end]


@pytest.mark.parametrize("mode", ["tensor", "layer"])
@pytest.mark.parametrize("model", MODELS)
def test_the_tokens_of_the_goldens(
    mini: Path, plan_for: Callable[..., Any], drive: Callable[..., Any], model: str, mode: str
) -> None:
    path = mini / model / "model-f16.gguf"
    check(mini / model, plan_for(path, "cuda", ranks=2, split_mode=mode), drive, TIE)


@pytest.mark.parametrize("model", ["llama", "qwen3", "qwen35"])
def test_positions_that_are_shared_out(
    mini: Path, plan_for: Callable[..., Any], drive: Callable[..., Any], model: str
) -> None:
    options = {"ranks": 2, "split_mode": "tensor", "kv_split": "positions"}
    plan = plan_for(mini / model / "model-f16.gguf", "cuda", **options)
    check(mini / model, plan, drive, FAMILY_TIE if model == "qwen35" else TIE)


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        *((model, "experts") for model in EXPERTS),
        *((model, mode) for model in FAMILIES for mode in ("tensor", "layer")),
    ],
)
def test_the_tokens_of_the_families(
    mini: Path, plan_for: Callable[..., Any], drive: Callable[..., Any], model: str, mode: str
) -> None:
    options = {"ranks": 2, "split_mode": mode, "router_input": "f32"}
    plan = plan_for(mini / model / "model-f16.gguf", "cuda", **options)
    check(mini / model, plan, drive, FAMILY_TIE)
