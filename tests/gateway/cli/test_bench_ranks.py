"""voltapile bench over several ranks: the same steps, in processes of their own."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.gateway.cli import main
from voltapile.gateway.cli.bench_load import Load
from voltapile.gateway.cli.bench_ranks import open_ranks

Make = Callable[..., Any]


def test_a_bench_of_two_ranks(
    mini: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = str(mini / "llama/model-f16.gguf")
    argv = ["bench", "-m", model, "-p", "70", "-n", "5", "-r", "1", "-npl", "2", "--json"]
    assert main.main([*argv, "--ranks", "2", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["streams"]) == (2, 2)
    assert found["prefill_tok_s"] > 0 < found["decode_tok_s"]


def test_the_ranks_compute(mini: Path, plan_for: Make, engine_for: Make, tmp_path: Path) -> None:
    """The tokens of an Engine in this process."""
    path = mini / "llama/model-f16.gguf"
    prompts = np.random.default_rng(1).integers(0, 640, (1, 70))
    plan = plan_for(path, "cpu", endpoint=f"ipc://{tmp_path}/s", ranks=2, context=128)
    with open_ranks(plan) as ranks:
        found = Load(ranks, 1, 8, 0.0)
        step = next(found._prefill(prompts, 8))
        tokens = ranks.run(step).rows[0].tokens
    engine = engine_for(path, "cpu", context=128)
    assert engine.run(next(Load(engine, 1, 8, 0.0)._prefill(prompts, 8))).rows[0].tokens == tokens


def test_what_a_worker_says_at_its_end(mini: Path, plan_for: Make, tmp_path: Path) -> None:
    """Dummy weights are a GPU's; every rank says so, and the bench ends."""
    plan = plan_for(mini / "llama/model-f16.gguf", "cpu", endpoint=f"ipc://{tmp_path}/s", ranks=2)
    with pytest.raises(RuntimeError, match="dummy weights"), open_ranks(plan, is_dummy=True):
        pass
