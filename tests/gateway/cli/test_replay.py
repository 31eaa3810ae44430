"""voltapile bench --replay: a recorded log gives the recorded tokens, and says so when not."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from voltapile.gateway.cli import main
from voltapile.topology.plan import from_json, to_json
from voltapile.workers import steplog
from voltapile.workers.protocol import Ready, Result, Row, Sampling, Step, encode

Make = Callable[..., Any]
PROMPT = np.arange(30, 130, dtype=np.int32)
SAMPLING = Sampling(temperature=1.0, seed=3, frequency_penalty=0.5, prompt_tokens=100)


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Log:
    """One request of a hundred prompt tokens and five generated ones, as a worker records it."""

    def __init__(self, engine: Any, folder: Path) -> None:
        self.engine, self.plan = engine, folder / "plan.json"
        self.path = folder / "steps"
        self.plan.write_bytes(to_json(engine.plan))
        pages = [group.pages for group in engine.plan.caches]
        self.messages: list[Any] = [Ready(name="text-0", plan="", pages=pages, slots=4)]
        first = Row(slot=0, tokens=PROMPT, pages=[[1, 2] for _ in pages], sampling=SAMPLING)
        for i, row in enumerate([first] + [Row(slot=0)] * 4):
            step = Step(id=i, rows=[row])
            self.messages += [step, engine.run(step)]
        engine.forget()

    def replay(self, *extra: str) -> int:
        with self.path.open("wb") as file:
            for message in self.messages:
                steplog.write(file, encode(message))
        return main.main(["bench", "--replay", str(self.path), "--plan", str(self.plan), *extra])


@pytest.fixture
def log(mini: Path, engine_for: Make, tmp_path: Path) -> Log:
    return Log(engine_for(mini / "llama/model-f16.gguf", "cpu", context=256), tmp_path)


def test_the_recorded_tokens_come_again(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log.messages *= 2  # the worker was started again
    assert log.replay("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["prompt_tokens"], found["generated"]) == (10, 200, 10)
    assert (found["compared"], found["different"]) == (10, 0)
    assert found["seconds"] > 0 < found["tok_s"]
    assert log.replay() == 0
    assert "10 of 10 results give the recorded tokens" in capsys.readouterr().out


def test_rounds_come_again(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    """As many as had a Result."""
    results = [message for message in log.messages[4:] if isinstance(message, Result)]
    later = [msgspec.structs.replace(result, id=1) for result in results]
    log.messages[3] = msgspec.structs.replace(log.messages[3], rounds=30)
    log.messages[4:] = later
    log.messages *= 2
    assert log.replay("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["compared"], found["different"]) == (10, 10, 0)


def test_another_token_is_seen(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log.messages[6].rows[0].tokens[0] ^= 1
    assert log.replay() == 1
    out = capsys.readouterr().out
    assert "step 2: recorded" in out
    assert "4 of 5 results give the recorded tokens" in out


def test_the_step_that_killed_has_no_result(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(log.messages.pop(), Result)
    assert log.replay("--json") == 0
    assert json.loads(capsys.readouterr().out)["compared"] == 4


def test_the_same_options_make_the_same_plan(log: Log, mini: Path) -> None:
    log.messages[0].slots = 1
    log.replay()
    model = str(mini / "llama/model-f16.gguf")
    assert main.main(["bench", "--replay", str(log.path), "-m", model, "-c", "256"]) == 0


def test_another_plan_is_told_of(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    mine = from_json(log.plan.read_bytes()).id
    log.messages[0].plan = mine
    assert log.replay() == 0
    assert capsys.readouterr().err == ""
    log.messages[0].plan = "abc"
    assert log.replay() == 0
    assert f"was recorded with plan abc, and this is plan {mine}" in capsys.readouterr().err


def test_another_plan_is_refused(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log.messages[0].slots = 5
    assert log.replay() == 1
    assert "was recorded with 5 slots" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\1\0\0\0\3\0\0\0abc"])
def test_not_a_log(log: Log, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    log.path.write_bytes(content)
    argv = ["bench", "--replay", str(log.path), "--plan", str(log.plan)]
    assert main.main(argv) == 1
    assert str(log.path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--replay", "x"], "either --plan FILE or -m FILE"),
        (["--replay", "x", "-m", "y", "-t", "1,2"], "one thread count"),
        ([], "give -m FILE"),
    ],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main.main(["bench", *argv]) == 2
    assert message in capsys.readouterr().err


def test_other_ranks_give_the_recorded_tokens(log: Log, mini: Path, plan_for: Make) -> None:
    options = {"context": 256, "ranks": 2, "split_mode": "layer"}
    plan = plan_for(mini / "llama/model-f16.gguf", "cpu", **options)
    log.plan.write_bytes(to_json(plan))
    log.messages *= 2
    assert log.replay() == 0
