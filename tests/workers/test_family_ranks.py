"""Experts, delta nets, streams and chosen blocks on several ranks: the tokens of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.topology.plan import PlanError

Make = Callable[..., Any]
MINI = ("qwen3moe", "qwen3next", "qwen35", "qwen35moe", "qwen4exp")
MARGIN = 1e-3  # of the largest logit: a token that wins by less may change with the order of sums


def check(alone: Any, group: Any, drive: Make, ids: list[int], count: int) -> int:
    """The tokens of one rank, up to the first that wins by less than the tolerance; how many."""
    expected, found = drive(alone).generate(ids, count), drive(group).generate(ids, count)
    whole = np.asarray(ids + expected[:-1], np.int32)
    logits = np.concatenate(list(alone.prompt_logits(whole)))[len(ids) - 1 :]
    best = np.sort(logits, axis=1)[:, -2:]
    close = np.flatnonzero(best[:, 1] - best[:, 0] < MARGIN * np.abs(logits).max(axis=1))
    end = int(close[0]) if len(close) else count
    assert found[:end] == expected[:end]
    return end


def compare(
    engine_for: Make, ranks_for: Make, drive: Make, path: Path, backend: str, **options: Any
) -> None:
    try:
        group = ranks_for(path, backend, **options)
    except PlanError as error:
        pytest.skip(str(error))  # fewer layers than ranks, or no experts
    alone = engine_for(path, backend)
    prompts = json.loads((path.parent / "golden.json").read_text())["prompts"]
    compared = [check(alone, group, drive, ids, 12) for ids in prompts.values()]
    assert sum(compared) >= len(compared) * 6, "margins leave too little to compare"
    for engine in group.engines:
        for purpose, (planned, allocated) in engine.memory().items():
            assert backend == "reference" or allocated <= planned * 1.02, purpose


SLOW = pytest.mark.slow  # what is dealt unevenly is so in the others, too


@pytest.mark.parametrize(
    ("ranks", "mode"),
    [
        (3, "tensor"),
        (2, "experts"),
        (2, "layer"),
        pytest.param(2, "tensor", marks=SLOW),
        pytest.param(3, "experts", marks=SLOW),
        pytest.param(3, "layer", marks=SLOW),
    ],
)
@pytest.mark.parametrize("model", MINI)
def test_mini(
    mini: Path, engine_for: Make, ranks_for: Make, drive: Make, model: str, ranks: int, mode: str
) -> None:
    path = mini / model / "model-f16.gguf"
    compare(engine_for, ranks_for, drive, path, "reference", ranks=ranks, split_mode=mode)


GOLDENS = [
    ("qwen3moe", "IQ4_NL"),
    ("qwen3moe-k", "Q4_K_M"),
    ("qwen3next", "Q8_0"),
    ("qwen35", "Q8_0"),
    ("qwen35-k", "Q4_K_M"),
    ("qwen35moe", "Q8_0"),
    ("qwen4exp", "f16"),
    ("qwen4exp-k", "Q4_K_M"),
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tensor", "experts", "layer"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize(("model", "kind"), [*GOLDENS, *((name, "mini") for name in MINI)])
def test_every_golden(
    request: pytest.FixtureRequest,
    mini: Path,
    engine_for: Make,
    ranks_for: Make,
    drive: Make,
    model: str,
    kind: str,
    ranks: int,
    mode: str,
) -> None:
    folder = (mini if kind == "mini" else request.getfixturevalue("golden")) / model
    path = folder / ("model-f16.gguf" if kind == "mini" else f"model-{kind}.gguf")
    compare(engine_for, ranks_for, drive, path, "cpu", ranks=ranks, split_mode=mode)
