"""What the log says of loading, and what a shortage of memory says."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.workers import engine as engine_module
from voltapile.workers import loading
from voltapile.workers.engine import open_engine
from voltapile.workers.loading import Stages, beside, comparison, shortage


def test_stages_are_timed_and_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 13.0, 13.5])
    monkeypatch.setattr(loading.time, "perf_counter", lambda: next(clock))
    heard: list[tuple[str, float]] = []
    stages = Stages(lambda *each: heard.append(each))
    said = [("file", 0.0), ("weights", 0.0), ("capture", 0.0), ("ready", 1.0)]
    for each in said:
        stages(*each)
    assert heard == said
    assert stages.summary(3 * 10**9) == (
        "loaded in 3.5 s: file 1.0 s, weights 2.0 s (1.5 GB/s), capture 0.5 s"
    )


def test_a_stage_begins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(loading.time, "perf_counter", lambda: next(clock))
    stages = Stages(lambda *each: None)
    for fraction in (0.0, 0.5, 1.0):
        stages("weights", fraction)
    stages("ready", 1.0)
    assert stages.summary(0) == "loaded in 3.0 s: weights 3.0 s", "nothing is read yet"


def test_loading_is_logged(
    mini: Path, plan_for: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """With a speed, where the file is read and not only mapped."""
    for no_mmap in (False, True):
        plan = plan_for(mini / "llama/model-f16.gguf", "cpu", no_mmap=no_mmap)
        caplog.clear()
        with caplog.at_level(logging.INFO), open_engine(plan):
            pass
        assert "weights" in caplog.text
        assert ("GB/s" in caplog.text) == no_mmap


def test_where_cpus_may_not_be_chosen(
    mini: Path, plan_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may refuse it: the end of loading, and of the engine, does not depend on it."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with open_engine(plan_for(mini / "llama/model-f16.gguf", "cpu")) as engine:
        assert engine.memory()


def test_a_shortage_is_told_beside_the_plan(
    mini: Path, plan_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(mini / "llama/model-f16.gguf", "cpu")

    def load(*_: Any) -> Any:
        return np.zeros(1 << 60, np.uint8)

    monkeypatch.setattr(engine_module, "load_ops", load)
    with (
        pytest.raises(
            MemoryError, match=r"Unable to allocate .* the plan has weights 0\.0 MiB, kv"
        ),
        open_engine(plan),
    ):
        pass


def test_bytes_are_readable() -> None:
    told = str(shortage(MemoryError(), {"weights": 3 << 30, "kv": 512 << 20}))
    assert told.startswith("out of memory; the plan has weights 3.00 GiB, kv 512.0 MiB: 3.50 GiB")


def test_who_has_taken_the_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "others", lambda: ["python (process 7) has 3.0 GiB of GPU 0"])
    told = str(shortage(MemoryError("the GPU has no room for weights"), {"weights": 3 << 30}))
    assert "counted on (python (process 7) has 3.0 GiB of GPU 0). Free that" in told
    assert "process 7" not in str(shortage(MemoryError("no memory here"), {"weights": 3 << 30}))


def test_planned_and_allocated_bytes_side_by_side() -> None:
    planned = {"weights": 3 << 30, "kv": 512 << 20, "slots": 1 << 20, "reserve": 7}
    found = beside(planned, {"kv": 511 << 20, "weights": 3 << 30, "constants": 9})
    assert found == {"kv": (512 << 20, 511 << 20), "weights": (3 << 30, 3 << 30)}
    assert comparison(found) == (
        "memory planned / allocated: kv 512.0 MiB / 511.0 MiB, weights 3.00 GiB / 3.00 GiB"
    )
    together = beside(planned, {"caches and slots": 520 << 20})
    assert together == {"caches and slots": (513 << 20, 520 << 20)}
