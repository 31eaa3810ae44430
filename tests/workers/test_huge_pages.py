"""Weights copied into memory instead of mapped: the same logits, the bytes that the Plan says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.workers import weights

Make = Callable[..., Any]


def test_copied_weights_give_the_same_bits(mini: Path, engine_for: Make, plan_for: Make) -> None:
    path = mini / "qwen2/model-f16.gguf"
    mapped, copied = engine_for(path, "cpu"), engine_for(path, "cpu", no_mmap=True)
    ids = np.arange(60, dtype=np.int32)
    for ours, theirs in zip(mapped.prompt_logits(ids), copied.prompt_logits(ids), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_plan_counts_the_copy(mini: Path, plan_for: Make) -> None:
    path = mini / "qwen2/model-f16.gguf"
    plan, mapped = plan_for(path, "cpu", no_mmap=True), plan_for(path, "cpu")
    tensors = sum(each.bytes for each in plan.tensors.values())
    assert tensors <= plan.ranks[0].memory["weights"] <= tensors + (6 << 20)
    assert {each.tier for each in plan.tensors.values()} == {"host"}
    assert mapped.ranks[0].memory["weights"] == 0


def test_huge_pages_that_are_not_there_are_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights.huge, "private_fault", lambda: "none: change it")
    with caplog.at_level(logging.INFO):
        weights.HugePages(5000)
    assert [record.message for record in caplog.records] == [
        "weights are copied to small pages, which are slower to read: none: change it"
    ]
