"""The Steps of a bench are those of a gateway, and a GPU's pauses are counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from voltapile.gateway.cli.bench_load import Load, gpu_idle
from voltapile.workers.protocol import Result, Sampled, Step

Make = Callable[..., Any]


@pytest.fixture
def load(mini: Path, engine_for: Make) -> Callable[..., Load]:
    """load(streams, count, model, **Options fields) -> a Load that keeps its Steps in .steps."""

    def make(streams: int, count: int, model: str = "llama", **options: Any) -> Load:
        engine = engine_for(mini / model / "model-f16.gguf", "cpu", slots=streams, **options)
        found, submit = Load(engine, streams, count, 0.0), engine.submit
        found.steps = []  # type: ignore[attr-defined]

        def kept(step: Step) -> Any:
            found.steps.append(step)  # type: ignore[attr-defined]
            return submit(step)

        engine.submit = kept
        return found

    return make


def prompts(streams: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(40, 400, (streams, length))


def test_streams_generate_together(load: Make) -> None:
    one = load(3, 5)
    seconds = one.run(prompts(3, 150))
    assert min(seconds) > 0
    prefill, decode, last = one.steps[:1], one.steps[1:6], one.steps[6:]
    assert [len(row.tokens) for step in prefill for row in step.rows] == [150, 150, 150]
    assert all([row.slot for row in step.rows] == [0, 1, 2] for step in decode)
    assert [step.release for step in last] == [[0, 1, 2]]


def test_prompts_are_packed_into_steps(load: Make) -> None:
    one = load(3, 2, batch_tokens=256)
    given = prompts(3, 300)
    one.run(given)
    steps = [step for step in one.steps if step.rows and len(step.rows[0].tokens)]
    sizes = [[len(row.tokens) for row in step.rows] for step in steps]
    assert sizes == [[256], [44, 192], [108, 128], [172]]
    assert all(row.start % 64 == 0 for step in steps for row in step.rows)
    for slot in range(3):
        rows = [row for step in steps for row in step.rows if row.slot == slot]
        assert np.concatenate([row.tokens for row in rows]).tolist() == given[slot].tolist()
        assert [row.sample for row in rows] == [False] * (len(rows) - 1) + [True]
        assert [row.sampling is not None for row in rows] == [True] + [False] * (len(rows) - 1)


def test_prompts_begin_behind_what_was_filled(load: Make, engine_for: Make, mini: Path) -> None:
    engine = engine_for(mini / "llama/model-f16.gguf", "cpu", slots=2)
    one, steps, submit = Load(engine, 2, 3, 0.0, depth=128), [], engine.submit
    engine.submit = lambda step: steps.append(step) or submit(step)
    one.run(prompts(2, 70))
    rows = [row for step in steps for row in step.rows if len(row.tokens)]
    assert [row.start for row in rows] == [128, 128]
    assert [len(row.pages[0]) for row in rows] == [-(-(128 + 70 + 3 + 1) // 64)] * 2


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_no_two_streams_share_a_page(load: Make, model: str) -> None:
    one = load(3, 2, model)
    pages = [one._pages(slot, 400) for slot in range(3)]
    for number, group in enumerate(one.engine.plan.caches):
        each = [set(of_slot[number]) for of_slot in pages]
        assert not each[0] & each[1] | each[1] & each[2] | each[0] & each[2]
        assert 0 < min(map(min, each)) <= max(map(max, each)) < group.pages


def test_too_little_memory_is_told(load: Make) -> None:
    with pytest.raises(ValueError, match="pages for 512 tokens of each of 3 streams, not for 600"):
        load(3, 2)._pages(0, 600)


class FakeDevice:
    """Events are numbers: what a device's clock says at each."""

    def __init__(self, times: list[float]) -> None:
        self.times = iter(times)

    def event(self) -> float:
        return next(self.times)

    def seconds_between(self, first: float, last: float) -> float:
        return last - first


def test_pauses_between_recorded_steps(load: Make) -> None:
    one = load(2, 3)
    engine = one.engine
    graphs = dict(engine.graphs)
    assert gpu_idle(one, prompts(2, 10)) is None, "there is no GPU"
    ops, device = engine.ops, FakeDevice([1, 5, 6, 10, 10.5, 11])
    engine.ops = SimpleNamespace(device=device, fetch=ops.fetch, reset_scratch=ops.reset_scratch,
                                 scope=ops.scope, begin=ops.begin, sample=ops.sample)  # fmt: skip
    assert gpu_idle(one, prompts(2, 10)) == pytest.approx((1 + 0.5) / 10)
    assert engine.graphs == graphs


def test_streams_that_end_early_end_the_bench(load: Make) -> None:
    """Slots that have ended are computed on, but behind no context."""
    one = load(2, 5)
    collect = one.engine.collect

    def ended(pending: Any) -> Result:
        result = collect(pending)
        if len(one.steps) > 3 and result.rows:
            result.rows[1] = Sampled(slot=1, finish="error", error="rank 0: non-finite logits")
        return result

    one.engine.collect = ended
    with pytest.raises(RuntimeError, match="stream 1 ended: rank 0: non-finite logits"):
        one.run(prompts(2, 70))
