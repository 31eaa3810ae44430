"""Goldens of dense models: the reference against other engines, the CPU against the reference.

Bounds of the CPU backend are one twentieth of llama.cpp's own KL against exact dequantisation
(golden/TABLES.md, column "KL mean"), and 1e-5 for files that are not quantised.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Make = Callable[..., Any]

MODELS = [
    ("llama-tied", "f32"),
    ("llama-tied", "Q8_0"),
    ("llama-tied", "Q4_0"),
    ("llama-tied", "Q4_K_M"),
    ("llama-untied", "Q8_0"),
    ("qwen2", "Q8_0"),
    ("qwen2", "Q4_K_M"),
    ("qwen3", "f16"),
    ("qwen3", "Q4_K_M"),
    ("gemma3", "Q8_0"),
]
FAMILIES = [
    ("qwen3moe", "f16"),
    ("qwen3moe", "IQ4_NL"),
    ("qwen3moe-k", "Q4_K_M"),
    ("qwen3next", "Q8_0"),
    ("qwen35", "Q8_0"),
    ("qwen35-k", "Q4_K_M"),
    ("qwen35moe", "Q8_0"),
    ("qwen4exp", "f16"),
    ("qwen4exp-k", "Q4_K_M"),
]
MINI = ("llama", "qwen2", "qwen3", "gemma3")
LLAMA_CPP_KL = {
    ("llama-tied", "Q8_0"): 3.6e-3,
    ("llama-tied", "Q4_0"): 3.7e-3,
    ("llama-tied", "Q4_K_M"): 7.4e-3,
    ("llama-untied", "Q8_0"): 1.9e-3,
    ("qwen2", "Q8_0"): 2.4e-3,
    ("qwen2", "Q4_K_M"): 5.0e-3,
    ("qwen3", "Q4_K_M"): 2.4e-3,
    ("gemma3", "Q8_0"): 2.3e-3,
}
NOT_QUANTISED_KL = 1e-5
RELATIVE = 1e-4  # of the largest logit
GELU_TABLE = 6e-4  # the same where the stored answers are llama.cpp's, with its 16-bit GELU
TIE = 2e-4  # of the largest logit: an argmax may differ where two logits are this close


class Golden:
    """The stored answers of one engine (`who`) for one model."""

    def __init__(self, folder: Path, who: str) -> None:
        self.prompts: dict[str, list[int]] = json.loads((folder / "golden.json").read_text())[
            "prompts"
        ]
        self.arrays = np.load(folder / "golden.npz")
        self.prefix = f"{who}." if who else ""

    def __call__(self, prompt: str, what: str) -> np.ndarray:
        return self.arrays[f"{self.prefix}{prompt}.{what}"]


def check_logits(
    golden: Golden, prompt: str, logits: np.ndarray, relative: float = RELATIVE
) -> None:
    expected = golden(prompt, "last4")
    largest = np.abs(expected).max()
    assert np.abs(logits[-4:] - expected).max() <= relative * largest
    best = golden(prompt, "argmax")
    behind = logits.max(axis=1) - logits[np.arange(len(best)), best]
    assert behind.max() <= TIE * largest


def check_greedy(golden: Golden, prompt: str, tokens: list[int], tolerance: float) -> None:
    margins = golden(prompt, "greedy_margin")
    near_ties = np.flatnonzero(margins < tolerance)
    end = int(near_ties[0]) if len(near_ties) else len(margins)
    assert end >= len(margins) // 2, "the golden's margins leave nothing to compare"
    assert tokens[:end] == golden(prompt, "greedy")[:end].tolist()


def mean_kl(truth: np.ndarray, other: np.ndarray) -> float:
    """Mean over positions of KL(truth || other), in float64."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        x = x - x.max(axis=1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))

    p, q = log_softmax(truth), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def all_logits(engine: Any, ids: list[int]) -> np.ndarray:
    return np.concatenate(list(engine.prompt_logits(np.asarray(ids, np.int32))))


def check_all(golden: Golden, engine: Any, drive: Make, relative: float = RELATIVE) -> None:
    for prompt, ids in golden.prompts.items():
        check_logits(golden, prompt, all_logits(engine, ids), relative)
        count = len(golden(prompt, "greedy"))
        tokens = drive(engine).generate(ids, count)
        check_greedy(golden, prompt, tokens, 1e-3)


@pytest.mark.parametrize("model", MINI)
def test_reference_mini(mini: Path, engine_for: Make, drive: Make, model: str) -> None:
    engine = engine_for(mini / model / "model-f16.gguf")
    check_all(Golden(mini / model, ""), engine, drive)


@pytest.mark.parametrize(
    ("model", "kind"),
    [*MODELS, *(pytest.param(*each, marks=pytest.mark.slow) for each in FAMILIES)],
)
def test_reference(golden: Path, engine_for: Make, drive: Make, model: str, kind: str) -> None:
    # The stored answers come from a router that sees float32.
    engine = engine_for(golden / model / f"model-{kind}.gguf", router_input="f32")
    who = "hf" if kind in ("f16", "f32") else f"deq_{kind}"
    relative = GELU_TABLE if model == "gemma3" else RELATIVE
    check_all(Golden(golden / model, who), engine, drive, relative)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("model", "kind"), [("llama-tied", "f32"), ("qwen3", "f16")])
def test_every_layer(golden: Path, engine_for: Make, backend: str, model: str, kind: str) -> None:
    """Taps are the hidden states that Hugging Face has at the same places."""
    exact = {"cache_type_k": "f32", "cache_type_v": "f32"}
    engine = engine_for(golden / model / f"model-{kind}.gguf", backend, **exact)
    stored = Golden(golden / model, "")
    tokens = np.asarray(stored.prompts["p61"], np.int32)
    engine.caches.append(0, [[1, 2, 3, 4]])
    engine.ops.reset_scratch()
    batch = engine.buffer.fill_all_outputs(0, tokens, 0)
    boundaries = range(len(engine.model.blk) + 1)
    _, taps = engine.model.forward(batch, engine.caches.layers, boundaries)
    for i in boundaries:
        name = "embed" if i == 0 else f"layer{i - 1}.out"
        last, norms = stored(f"act.p61.{name}", "last"), stored(f"act.p61.{name}", "norms")
        hidden = engine.ops.to_host(taps[i])
        np.testing.assert_allclose(hidden[-1], last, atol=RELATIVE * np.abs(last).max())
        np.testing.assert_allclose(np.linalg.norm(hidden, axis=1), norms, rtol=RELATIVE)


@pytest.mark.parametrize(("model", "kind"), [*MODELS, *((name, "mini") for name in MINI)])
def test_cpu_against_reference(
    request: pytest.FixtureRequest, mini: Path, engine_for: Make, drive: Make, model: str, kind: str
) -> None:
    folder = (mini if kind == "mini" else request.getfixturevalue("golden")) / model
    path = folder / ("model-f16.gguf" if kind == "mini" else f"model-{kind}.gguf")
    truth, engine = engine_for(path), engine_for(path, "cpu")
    divergences = []
    for ids in Golden(folder, "").prompts.values():
        divergences.append(mean_kl(all_logits(truth, ids), all_logits(engine, ids)))
        if (model, kind) not in LLAMA_CPP_KL:
            assert drive(engine).generate(ids, 16) == drive(truth).generate(ids, 16)
    bound = LLAMA_CPP_KL.get((model, kind))
    assert max(divergences) <= (bound / 20 if bound else NOT_QUANTISED_KL)


@pytest.mark.parametrize("model", MINI)
def test_outliers(
    mini: Path, tmp_path: Path, with_outliers: Make, engine_for: Make, model: str
) -> None:
    """Activations of which a few are 1,000 times larger lose no accuracy; the function is the
    same, so the tokens of the model as it was are the truth for the reference, too."""
    path = with_outliers(mini / model / "model-f16.gguf", tmp_path / "outliers.gguf")
    before, truth = engine_for(mini / model / "model-f16.gguf"), engine_for(path)
    engine = engine_for(path, "cpu")
    for ids in Golden(mini / model, "").prompts.values():
        expected = all_logits(truth, ids)
        # The columns that were divided are rounded to halves once more.
        assert mean_kl(all_logits(before, ids), expected) <= 1e-4
        assert mean_kl(expected, all_logits(engine, ids)) <= NOT_QUANTISED_KL


@pytest.mark.parametrize(("model", "kind"), LLAMA_CPP_KL)
def test_cpu_with_a_cache_of_bytes(golden: Path, engine_for: Make, model: str, kind: str) -> None:
    """Keys and values in q8_0: a fifth of llama.cpp's own divergence, over all positions."""
    path = golden / model / f"model-{kind}.gguf"
    engine = engine_for(path, "cpu", cache_type_k="q8_0", cache_type_v="q8_0")
    prompts = Golden(golden / model, "").prompts.values()
    ours, theirs = (
        np.concatenate([all_logits(each, ids) for ids in prompts])
        for each in (engine, engine_for(path))
    )
    assert mean_kl(theirs, ours) <= LLAMA_CPP_KL[model, kind] / 5


@pytest.mark.model
@pytest.mark.parametrize("item", range(6))
def test_smollm2(data: Path, smollm2: Path, engine_for: Make, drive: Make, item: int) -> None:
    """The tokens of two other engines on the exactly dequantised weights."""
    stored = json.loads((data / "smollm2.json").read_text())[item]
    engine = engine_for(smollm2, "cpu")
    assert drive(engine).generate(stored["ids"], 64) == stored["greedy"]
