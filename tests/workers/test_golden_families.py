"""The CPU against the reference on models with experts, delta nets, streams and chosen blocks.

Bounds of KL are one twentieth of llama.cpp's own against exact dequantisation (golden/TABLES.md). A
choice of experts is a jump: the CPU is made to take the reference's, and its own choices are
compared apart, by the margin that the reference had.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.workers.protocol import Row

Make = Callable[..., Any]

LLAMA_CPP_KL = {
    ("qwen3moe", "Q8_0"): 5.0e-3,
    ("qwen3moe", "IQ4_NL"): 4.0e-3,
    ("qwen3moe-k", "Q5_K_M"): 2.1e-2,
    ("qwen3moe-k", "Q4_K_M"): 2.1e-2,
    ("qwen3moe-k", "IQ4_XS"): 1.4e-2,
    ("qwen3moe-k", "IQ3_S"): 8.8e-2,
    ("qwen3moe-k", "Q2_K"): 2.1e-2,
    ("qwen3next", "Q8_0"): 5.8e-2,
    ("qwen35", "Q8_0"): 9.3e-3,
    ("qwen35", "IQ4_NL"): 9.4e-3,
    ("qwen35-k", "Q4_K_M"): 1.2e-2,
    ("qwen35-k", "IQ3_S"): 1.3e-2,
    ("qwen35moe", "Q8_0"): 5.6e-2,
    ("qwen4exp", "Q8_0"): 2.3e-3,
    ("qwen4exp-k", "Q4_K_M"): 7.5e-4,
}
USUAL = [("qwen3moe", "Q8_0"), ("qwen35-k", "Q4_K_M"), ("qwen4exp", "Q8_0")]
MINI = ("qwen3moe", "qwen3next", "qwen35", "qwen35moe", "qwen4exp")
NOT_QUANTISED_KL = 1e-5
MARGIN = 0.02  # of a router's logits (some tens): nearer choices may differ


def prompts_of(folder: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = json.loads((folder / "golden.json").read_text())["prompts"]
    return found


def all_logits(engine: Any, ids: list[int]) -> np.ndarray:
    return np.concatenate(list(engine.prompt_logits(np.asarray(ids, np.int32))))


def mean_kl(truth: np.ndarray, other: np.ndarray) -> float:
    """Mean over positions of KL(truth || other), in float64."""
    p, q = (each.astype(np.float64) for each in (truth, other))
    p, q = (each - each.max(axis=1, keepdims=True) for each in (p, q))
    p, q = (each - np.log(np.exp(each).sum(axis=1, keepdims=True)) for each in (p, q))
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


class Choices:
    """Takes down how one engine's tokens are routed, and makes another one's take the same way."""

    def __init__(self) -> None:
        self.taken: list[tuple[np.ndarray, np.ndarray]] = []  # experts and logits of each call
        self.next = self.compared = 0

    def take_down(self, ops: Any) -> None:
        own = ops.route

        def route(x: Any, router: Any, used: int, *rest: Any) -> Any:
            routing = own(x, router, used, *rest)
            self.taken.append((routing[0].copy(), ops.linear(x, router).copy()))
            return routing

        ops.route = route

    def force(self, ops: Any) -> None:
        own = ops.route

        def route(x: Any, router: Any, used: int, *rest: Any) -> Any:
            chosen, _ = own(x, router, used, *rest)
            wanted, logits = self.taken[self.next]
            self.next += 1
            self.compare(chosen, wanted, logits)
            mine = np.take_along_axis(ops.to_host(ops.linear(x, router)), wanted, axis=1)
            shares = np.exp(mine - mine.max(axis=1, keepdims=True))
            return wanted, shares / shares.sum(axis=1, keepdims=True)

        ops.route = route

    def compare(self, chosen: np.ndarray, wanted: np.ndarray, logits: np.ndarray) -> None:
        used = chosen.shape[1]
        sorted_logits = -np.sort(-logits, axis=1)
        clear = sorted_logits[:, used - 1] - sorted_logits[:, used] > MARGIN
        np.testing.assert_array_equal(
            np.sort(chosen, axis=1)[clear], np.sort(wanted, axis=1)[clear]
        )
        self.compared += int(clear.sum())


def check(path: Path, prompts: dict[str, list[int]], bound: float, engine_for: Make) -> None:
    options = {"router_input": "f32"}  # so that `linear` gives the router's logits
    truth, engine = engine_for(path, **options), engine_for(path, "cpu", **options)
    choices = Choices()
    choices.take_down(truth.ops)
    choices.force(engine.ops)
    for ids in prompts.values():
        assert mean_kl(all_logits(truth, ids), all_logits(engine, ids)) <= bound
    calls = len(choices.taken)
    assert choices.next == calls
    assert choices.compared >= sum(len(each[0]) for each in choices.taken) * 0.9


@pytest.mark.parametrize(
    ("model", "kind"),
    [pytest.param(*key, marks=() if key in USUAL else pytest.mark.slow) for key in LLAMA_CPP_KL],
)
def test_cpu_against_reference(golden: Path, engine_for: Make, model: str, kind: str) -> None:
    folder = golden / model
    bound = LLAMA_CPP_KL[model, kind] / 20
    check(folder / f"model-{kind}.gguf", prompts_of(folder), bound, engine_for)


@pytest.mark.parametrize("model", MINI)
def test_mini(mini: Path, engine_for: Make, model: str) -> None:
    folder = mini / model
    check(folder / "model-f16.gguf", prompts_of(folder), NOT_QUANTISED_KL, engine_for)


@pytest.mark.parametrize(
    ("model", "kind"), [("qwen35", "Q8_0"), ("qwen35moe", "Q8_0"), ("qwen4exp", "Q8_0")]
)
def test_greedy_tokens(golden: Path, engine_for: Make, drive: Make, model: str, kind: str) -> None:
    """Through recorded steps, after prompts in chunks: the stored answer."""
    folder = golden / model
    driver = drive(engine_for(folder / f"model-{kind}.gguf", "cpu", router_input="f32"))
    answers = np.load(folder / "golden.npz")
    for chunk in (0, 64, 16):  # in a slot that has been used, from the second time on
        for name, ids in prompts_of(folder).items():
            margins = answers[f"deq_{kind}.{name}.greedy_margin"]
            end = int(np.append(np.flatnonzero(margins < 1e-2), len(margins))[0])
            found = driver.generate(ids, len(margins), chunk=chunk)
            assert found[:end] == answers[f"deq_{kind}.{name}.greedy"][:end].tolist()


@pytest.mark.parametrize("model", MINI)
def test_a_token_has_the_same_bits_in_any_company(
    mini: Path, engine_for: Make, drive: Make, model: str
) -> None:
    """Four requests in one recorded step answer as each does alone."""
    path, prompts = mini / model / "model-f16.gguf", list(prompts_of(mini / model).values())
    ids = [(prompts[i % len(prompts)] * 2)[i : i + 9 + i] for i in range(4)]
    driver = drive(engine_for(path, "cpu"))
    alone = [driver.generate(each, 12, slot=i, chunk=64) for i, each in enumerate(ids)]
    for slot, each in enumerate(ids):
        driver.step(driver.start(slot, each, 12))
    together: list[list[int]] = [[tokens[0]] for tokens in alone]
    for _ in range(11):
        for answer in driver.step([Row(slot=slot) for slot in range(4)]):
            together[answer.slot] += answer.tokens
    assert together == alone
