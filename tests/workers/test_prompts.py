"""What is wanted of whole prompts. The output matrix is linear, so that logits tell about means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.workers.protocol import Row, Want

Make = Callable[..., Any]
IDS = [5, 9, 100, 7, 33, 250, 8, 8, 91, 14] * 9


def logits_of(engine: Any, vector: np.ndarray) -> np.ndarray:
    with engine.ops.scope():
        hidden = engine.ops.zeros((1, len(vector)), np.float32)
        engine.ops.upload(hidden, vector.reshape(1, -1))
        return np.asarray(engine.ops.to_host(engine.model.head(hidden))[0])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("chunk", [0, 64])
def test_a_pooled_state(
    mini: Path, engine_for: Make, drive: Make, backend: str, chunk: int
) -> None:
    """Whole or in chunks, beside another request, which it leaves alone."""
    engine = engine_for(mini / "llama/model-f16.gguf", backend)
    driver = drive(engine)
    expected = driver.generate(IDS[:20], 4)
    other = list(driver.step(driver.start(1, IDS[:20], 8))[0].tokens)
    rows = driver.start(0, IDS, 1, chunk, prompt_tokens=len(IDS))
    rows[0].want = Want(hidden=True)
    for row in rows:
        answers = {answer.slot: answer for answer in driver.step([Row(slot=1), row])}
        other += answers[1].tokens
    assert answers[1].hidden is None
    vector = answers[0].hidden
    driver.release(0)
    driver.release(1)
    assert other == expected[: len(other)]
    mean = np.concatenate(list(engine.prompt_logits(np.asarray(IDS, np.int32)))).mean(axis=0)
    bound = 1e-4 if backend == "reference" else 2e-2
    np.testing.assert_allclose(logits_of(engine, vector), mean, atol=bound * np.abs(mean).max())


def test_the_last_state(mini: Path, engine_for: Make, drive: Make) -> None:
    engine = engine_for(mini / "qwen3/model-f16.gguf")
    engine.prompts.pooling = "last"
    driver = drive(engine)
    rows = driver.start(0, IDS[:30], 1, prompt_tokens=30)
    rows[0].want = Want(hidden=True, prompt_logprobs=0)
    [answer] = driver.step(rows)
    assert len(answer.prompt_logprobs) == 30
    driver.release(0)
    *_, last = np.concatenate(list(engine.prompt_logits(np.asarray(IDS[:30], np.int32))))
    np.testing.assert_allclose(logits_of(engine, answer.hidden), last, atol=1e-4)


def test_a_new_request_forgets_what_was_wanted(mini: Path, engine_for: Make, drive: Make) -> None:
    driver = drive(engine_for(mini / "llama/model-f16.gguf"))
    rows = driver.start(0, IDS, 1, 64, prompt_tokens=len(IDS))
    rows[0].want = Want(hidden=True)
    driver.step(rows[:1])
    driver.release(0)
    [answer] = driver.step(driver.start(0, IDS[:5], 1, prompt_tokens=5))
    assert answer.hidden is None
