"""Choices of experts are counted once each, planned, and told by layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.topology.architectures import spec_of
from voltapile.topology.scratch import counter_bytes
from voltapile.workers import routing
from voltapile.workers.protocol import Row
from voltapile.workers.routing import Routing

Make = Callable[..., Any]


def test_layers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is looked at every five seconds, and a look is not large."""
    monkeypatch.setattr(routing, "MOST_BYTES", 600)
    told = Routing({layer: np.zeros((2, 16), np.int64) for layer in (3, 4, 7)})
    assert told.due(1.0) == [3, 4]
    assert told.due(2.0) == []
    assert told.due(4.5) == [7, 3]
    assert told.due(7.8) == []
    assert told.due(9.0) == [4, 7]
    assert Routing({}).due(1.0) == []


def test_shares() -> None:
    """Of 16 experts two are an eighth."""
    counts = np.zeros((2, 16), np.int64)
    told = Routing({3: counts, 4: counts})
    assert told.choices() == {}
    assert told.shares() == {}
    even, odd = np.ones((2, 16), np.int64), np.zeros((2, 16), np.int64)
    odd[1, [2, 5, 9]] = 5, 4, 1
    told.take([3], [even])
    told.take([4], [odd])
    assert told.choices() == {"prompt": 16, "decode": 26}
    assert told.shares() == {(3, "prompt"): 0.125, (3, "decode"): 0.125, (4, "decode"): 0.9}
    told.take([4], [even])
    assert told.shares()[4, "decode"] == 0.125


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("model", ["qwen3moe", "qwen35moe", "qwen4exp"])
def test_every_choice_is_counted(
    mini: Path,
    engine_for: Make,
    drive: Make,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    backend: str,
) -> None:
    monkeypatch.setattr(routing, "SECONDS", 0.0)
    engine = engine_for(mini / model / "model-f16.gguf", backend)
    driver, spec = drive(engine), spec_of(engine.gguf)
    before = driver.step(driver.start(0, list(range(20)), 8)) and engine.routing.choices()
    for _ in range(3):
        driver.step([Row(slot=0)])
    after, each = engine.routing.choices(), spec.experts.used * spec.layers
    assert before["prompt"] >= 20 * each
    assert after["prompt"] == before["prompt"]
    assert after["decode"] - before["decode"] == 3 * each
    shares = engine.routing.shares()
    assert {layer for layer, _ in shares} == set(range(spec.layers))
    assert all(0 < share <= 1 for share in shares.values())
    taken = sum(array.nbytes for array in engine.model.counters().values())
    planned = counter_bytes(spec, engine.share)
    assert 0 < taken <= planned < taken + 256 * spec.layers


def test_ranks_that_count_alike_leave_it_to_one(mini: Path, ranks_for: Make) -> None:
    path = mini / "qwen3moe/model-f16.gguf"
    told = {}
    for mode in ("tensor", "layer"):
        group = ranks_for(path, "reference", ranks=2, split_mode=mode)
        told[mode] = [engine.routing.due(1.0) for engine in group.engines]
    assert told["tensor"] == [[0, 1, 2], []]
    assert [layer for rank in told["layer"] for layer in rank] == [0, 1, 2]
    assert all(told["layer"])
