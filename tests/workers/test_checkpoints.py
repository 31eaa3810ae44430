"""A slot goes on from the states of another; what is computed twice leaves states as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.workers.protocol import Copy, Row, Step, Want

Make = Callable[..., Any]
IDS = np.random.default_rng(5).integers(0, 640, 100).tolist()
MODELS = pytest.mark.parametrize("model", ["qwen35", "qwen4exp"])
BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])


@BACKENDS
@MODELS
def test_another_slot_goes_on(
    mini: Path, engine_for: Make, drive: Make, model: str, backend: str
) -> None:
    """From a checkpoint, with the first slot's pages, while that one goes on, too."""
    engine = engine_for(mini / model / "model-f16.gguf", backend)
    driver = drive(engine)
    expected = driver.generate(IDS, 6, chunk=64)
    rows = driver.start(0, IDS, 6, chunk=64)
    driver.step(rows[:1])
    engine.run(Step(id=9, copy=[Copy(kind="checkpoint", source=0, target=3)]))
    [answer] = driver.step(rows[1:])
    assert answer.tokens == expected[:1]
    engine.run(Step(id=10, copy=[Copy(kind="restore", source=3, target=2)]))
    first = [group[:1] for group in driver.held[0]]  # a page is 64 positions
    rest = driver.start(2, IDS, 6)[0]
    rest.start, rest.tokens = 64, np.asarray(IDS[64:], np.int32)
    rest.pages = [a + b[1:] for a, b in zip(first, driver.held[2], strict=True)]
    rest.history = np.asarray(IDS[:64], np.int32)
    tokens = list(driver.step([rest])[0].tokens)
    for _ in range(5):
        tokens += driver.step([Row(slot=2)])[0].tokens
    assert tokens == expected


@BACKENDS
@MODELS
def test_probabilities_of_a_prompt_change_no_token(
    mini: Path, engine_for: Make, drive: Make, model: str, backend: str
) -> None:
    engine = engine_for(mini / model / "model-f16.gguf", backend)
    driver = drive(engine)
    expected = driver.generate(IDS, 6, chunk=64)
    rows = driver.start(1, IDS, 6, chunk=64, prompt_tokens=len(IDS))
    rows[0].want = Want(prompt_logprobs=1)
    answers = [answer for row in rows for answer in driver.step([row])]
    tokens = list(answers[0].tokens)
    for _ in range(5):
        tokens += driver.step([Row(slot=1)])[0].tokens
    assert tokens == expected
    found = answers[0].prompt_logprobs
    logits = np.concatenate(list(engine.prompt_logits(np.asarray(IDS, np.int32))))
    best = logits.argmax(axis=1)[:-1].tolist()
    assert [pairs[1][0] for pairs in found[1:]] == best


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@MODELS
def test_a_state_that_is_not_finite(mini: Path, engine_for: Make, drive: Make, model: str) -> None:
    """Cannot be computed again: it is found where it is kept."""
    engine = engine_for(mini / model / "model-f16.gguf")
    driver = drive(engine)
    driver.step(driver.start(0, IDS[:20], 8))
    layer, state = engine.model.states()[1]
    state.values[1 if len(state.values) > 1 else 0][0] = np.nan
    [answer] = driver.step([Row(slot=0)])
    assert answer.finish == "error"
    assert f"first in the state of layer {layer}" in answer.error


def test_memory_is_counted(mini: Path, engine_for: Make) -> None:
    engine = engine_for(mini / "qwen35/model-f16.gguf", "cpu", checkpoints=3)
    planned, allocated = engine.memory()["checkpoints"]
    assert engine.plan.checkpoints == 12
    assert 0.9 * planned < allocated <= planned
    assert "checkpoints" not in engine_for(mini / "llama/model-f16.gguf", "cpu").memory()
