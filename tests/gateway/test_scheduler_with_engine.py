"""The scheduler and a real engine: shared pages, windows and preemptions change no token."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from voltapile.gateway.request import Request
from voltapile.gateway.scheduler import Scheduler
from voltapile.workers.engine import Engine
from voltapile.workers.protocol import Sampling, Step, decode, encode
from voltapile.workers.rounds import Rounds

EngineFor = Callable[..., Engine]
TOKENS = 100
PENALISED = {
    "temperature": 0.9,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
}


def text(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(600) for _ in range(length)]


COMMON = text(150, 0)
PROMPTS = [COMMON, COMMON, [*COMMON, *text(100, 1)], [*COMMON[:70], *text(20, 2)], text(64, 3)]


def run(engine: Engine, scheduler: Scheduler) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    rounds = Rounds()
    while True:
        while (step := scheduler.schedule()) is not None:
            message = decode([bytes(frame) for frame in encode(step)])
            assert isinstance(message, Step)
            rounds.add(message)
        if not rounds:
            return found
        result = engine.run(rounds.next())
        rounds.settle(result)
        for request, chunk in scheduler.apply(result):
            assert chunk.finish != "error"
            found.setdefault(request.id, []).extend(chunk.tokens)


def add(scheduler: Scheduler, prompt: list[int], seed: int, **sampling: Any) -> Request:
    asked = Sampling(seed=seed, max_position=len(prompt) + TOKENS, **sampling)
    return scheduler.add(prompt, asked, client=str(seed % 2))


@pytest.mark.parametrize("sampling", [{}, PENALISED], ids=["greedy", "penalised"])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_company_and_cache_change_no_token(
    mini: Path, engine_for: EngineFor, model: str, sampling: dict[str, Any]
) -> None:
    engine = engine_for(mini / model / "model-f16.gguf", "cpu", slots=3, batch_tokens=256)
    expected = []
    for seed, prompt in enumerate(PROMPTS):
        engine.forget()
        scheduler = Scheduler(engine.plan)
        request = add(scheduler, prompt, seed, **sampling)
        expected.append(run(engine, scheduler)[request.id])
    # The least of pages, so that some are evicted and some requests sent back.
    caches = [msgspec.structs.replace(c, pages=min(c.pages, 8)) for c in engine.plan.caches]
    for plan in (engine.plan, msgspec.structs.replace(engine.plan, caches=caches)):
        engine.forget()
        scheduler = Scheduler(plan, max_gap=0.0)
        for _ in range(2):
            requests = [add(scheduler, p, seed, **sampling) for seed, p in enumerate(PROMPTS)]
            found = run(engine, scheduler)
            assert [found[request.id] for request in requests] == expected
        assert scheduler.cached_tokens > 0
        assert (scheduler.preemptions > 0) == (plan is not engine.plan)
