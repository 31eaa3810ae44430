"""Models with experts, delta nets, streams and sparse attention, as the reference computes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.workers.protocol import Row

Make = Callable[..., Any]
FEW = [("qwen3moe", "Q8_0"), ("qwen35", "IQ4_NL"), ("qwen4exp", "Q8_0")]
TOLERANCE = 1e-3


def prompts_of(folder: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = json.loads((folder / "golden.json").read_text())["prompts"]
    return found


def all_logits(engine: Any, ids: list[int]) -> np.ndarray:
    return np.concatenate(list(engine.prompt_logits(np.asarray(ids, np.int32))))


@pytest.mark.parametrize(("model", "kind"), FEW)
def test_in_chunks_beside_others(
    golden: Path, engine_for: Make, drive: Make, model: str, kind: str
) -> None:
    """States belong to slots: what one prompt leaves there is nothing to another."""
    folder = golden / model
    driver = drive(engine_for(folder / f"model-{kind}.gguf", router_input="f32"))
    answers, names = np.load(folder / "golden.npz"), ("p61", "p8")
    for _ in range(2):  # the second time in slots that others have used
        prompts = [prompts_of(folder)[name] for name in names]
        rows = [driver.start(slot, ids, 20, chunk=16) for slot, ids in enumerate(prompts)]
        found: list[list[int]] = [[], []]
        for at in range(10):
            ended = [Row(slot=slot) for slot in range(2) if found[slot]]
            for answer in driver.step([*ended, *(row[at] for row in rows if at < len(row))]):
                found[answer.slot] += answer.tokens
        for slot, name in enumerate(names):
            margins = answers[f"deq_{kind}.{name}.greedy_margin"][: len(found[slot])]
            assert len(found[slot]) >= 6
            assert margins.min() > TOLERANCE
            expected = answers[f"deq_{kind}.{name}.greedy"][: len(found[slot])]
            assert found[slot] == expected.tolist()
            driver.release(slot)


def test_a_router_may_see_bf16(golden: Path, engine_for: Make) -> None:
    path, ids = golden / "qwen4exp/model-Q8_0.gguf", prompts_of(golden / "qwen4exp")["p8"]
    exact, rounded = (all_logits(engine_for(path, router_input=n), ids) for n in ("f32", ""))
    assert 0 < np.abs(exact - rounded).max() < 0.1 * np.abs(exact).max()


def test_experts_are_counted(golden: Path, engine_for: Make, drive: Make) -> None:
    """Apart for prompts and for generated tokens."""
    engine = engine_for(golden / "qwen3moe/model-Q8_0.gguf")
    drive(engine).generate(prompts_of(golden / "qwen3moe")["p61"], 5)
    for block in engine.model.blk.values():
        assert block.ffn.counts.sum(axis=1).tolist() == [61 * 4, 4 * 4]
