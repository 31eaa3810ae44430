"""voltapile score: perplexity against the definition, KL against another backend and a file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.gateway.cli import main

IDS = np.random.default_rng(5).integers(0, 650, 150).tolist()


def score(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main.main(["score", *argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def model(mini: Path) -> str:
    return str(mini / "llama/model-f16.gguf")


@pytest.fixture
def ids(tmp_path: Path) -> str:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(IDS))
    return str(path)


def test_perplexity_is_its_definition(
    capsys: pytest.CaptureFixture[str],
    mini: Path,
    model: str,
    ids: str,
    engine_for: Callable[..., Any],
) -> None:
    """Over windows of 64, 64 and 22 tokens, the first of each not counted."""
    found = score(capsys, "-m", model, "--ids", ids, "-c", "64", "--backend", "reference")
    engine, loss, count = engine_for(mini / "llama/model-f16.gguf"), 0.0, 0
    for start in range(0, len(IDS), 64):
        window = np.array(IDS[start : start + 64], np.int32)
        logits = np.concatenate(list(engine.prompt_logits(window))).astype(np.float64)
        for row, target in zip(logits[:-1], window[1:], strict=True):
            loss -= row[target] - np.log(np.exp(row).sum())
            count += 1
    assert found["tokens"] == count == len(IDS) - 3
    assert found["perplexity"] == pytest.approx(math.exp(loss / count), rel=1e-9)
    assert "kl_mean" not in found


def test_against_a_backend_and_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, ids: str
) -> None:
    stored = str(tmp_path / "logits.npz")
    same = ["-m", model, "--ids", ids, "-c", "64"]
    live = score(capsys, *same, "--against", "reference")
    assert 0 <= live["kl_mean"] < 1e-5
    assert live["kl_mean"] <= live["kl_max"]
    assert live["argmax_same"] > 0.98
    score(capsys, *same, "--backend", "reference", "--save", stored)
    kept = score(capsys, *same, "--logits", stored)
    assert kept["kl_mean"] == pytest.approx(live["kl_mean"], rel=1e-6, abs=1e-12)
    assert kept["perplexity"] == live["perplexity"]
    changed = ["-m", model, "--ids", ids, "-c", "128", "--logits", stored]
    assert main.main(["score", *changed]) == 1
    assert "another text" in capsys.readouterr().err


def test_a_text(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A text of some length, in which many a word comes twice. " * 3)
    assert score(capsys, "-m", model, "--file", str(text))["tokens"] > 20


@pytest.mark.parametrize("content", ["[1]", "[1, 999999]", '{"a": 1}', "[1, true]"])
def test_bad_ids(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, content: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    assert main.main(["score", "-m", model, "--ids", str(path)]) == 1
    assert "bad.json" in capsys.readouterr().err
