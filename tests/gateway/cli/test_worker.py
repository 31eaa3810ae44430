"""voltapile worker: which options make a worker (its life is tested in tests/workers)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from voltapile.gateway.cli import main
from voltapile.topology.plan import Plan, to_json
from voltapile.workers import process


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[process.Worker]:
    """The workers that would have run."""
    found: list[process.Worker] = []

    def run(worker: process.Worker) -> int:
        found.append(worker)
        return 0

    monkeypatch.setattr(process.Worker, "run", run)
    return found


def test_a_plan_or_the_options_of_one(
    mini: Path, tmp_path: Path, plan_for: Callable[..., Plan], started: list[process.Worker]
) -> None:
    model = mini / "llama/model-f16.gguf"
    path = tmp_path / "plan.json"
    path.write_bytes(to_json(plan_for(model, "cpu")))
    assert main.main(["worker", "--plan", str(path), "--connect", "tcp://127.0.0.1:9"]) == 0
    argv = ["worker", "-m", str(model), "-c", "512", "-np", "4", "-t", "2"]
    assert main.main(argv) == 0
    by_plan, by_options = started
    assert by_plan.endpoint == "tcp://127.0.0.1:9"
    assert by_options.endpoint == by_options.plan.endpoint
    assert by_options.plan.id == by_plan.plan.id
    assert not by_plan.is_spawned


def test_a_log_stays_until_a_worker_has_begun(
    mini: Path, tmp_path: Path, started: list[process.Worker]
) -> None:
    """It may be another worker's, which refuses this one."""
    log = tmp_path / "log"
    log.write_bytes(b"steps")
    argv = ["worker", "-m", str(mini / "llama/model-f16.gguf"), "--record", str(log)]
    assert main.main(argv) == 0
    assert log.read_bytes() == b"steps"
    assert started[0].record == log
    assert main.main([*argv[:-1], str(tmp_path / "none" / "log")]) == 1


@pytest.mark.parametrize(
    ("argv", "message", "code"),
    [
        ([], "either --plan FILE or -m FILE", 2),
        (["--plan", "nothing.json"], "nothing.json", 1),
    ],
)
def test_bad_options(
    capsys: pytest.CaptureFixture[str],
    started: list[process.Worker],
    argv: list[str],
    message: str,
    code: int,
) -> None:
    assert main.main(["worker", *argv]) == code
    assert message in capsys.readouterr().err
    assert not started
