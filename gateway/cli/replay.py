"""voltapile bench --replay: the Steps of a recorded log again, without a gateway.

Says how fast they run and whether each gives the tokens that the recording holds.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from voltapile.gateway.cli.bench_load import Driven
    from voltapile.topology.plan import Plan
    from voltapile.workers.protocol import Message, Ready, Result, Step


@dataclass
class Replay:
    """What has been run so far."""

    steps: int = 0
    prompt_tokens: int = 0
    generated: int = 0
    seconds: float = 0.0
    recorded_seconds: float = 0.0
    compared: int = 0
    differences: list[str] = field(default_factory=list)

    def run(self, engine: Driven, step: Step, count: int) -> Iterator[Result]:
        """The first `count` rounds of a Step."""
        from voltapile.workers.rounds import Rounds

        rounds = Rounds()
        step.rounds = count
        rounds.add(step)
        while rounds:
            yield self.round(engine, rounds.next())

    def round(self, engine: Driven, step: Step) -> Result:
        began = time.perf_counter()
        result = engine.run(step)
        self.seconds += time.perf_counter() - began
        self.steps += 1
        self.prompt_tokens += sum(len(row.tokens) for row in step.rows)
        self.generated += sum(len(row.tokens) for row in result.rows)
        return result

    def compare(self, found: Result, recorded: Result) -> None:
        self.compared += 1
        self.recorded_seconds += recorded.seconds
        ours, theirs = outcome(found), outcome(recorded)
        if ours != theirs:
            self.differences.append(f"step {recorded.id}: recorded {theirs}, found {ours}")

    def summary(self) -> dict[str, Any]:
        tokens = self.prompt_tokens + self.generated
        return {
            "steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "generated": self.generated,
            "seconds": round(self.seconds, 3),
            "recorded_seconds": round(self.recorded_seconds, 3),
            "tok_s": round(tokens / self.seconds, 2) if self.seconds else 0.0,
            "compared": self.compared,
            "different": len(self.differences),
        }


def replay(path: Path, plan: Plan, as_json: bool) -> int:
    """Run the log and print what came of it; returns the exit code. Raises ValueError, OSError."""
    from voltapile.gateway.cli.bench_ranks import open_driven
    from voltapile.workers.protocol import Ready, Result, Step

    found, life = Replay(), 0
    plans: set[str] = set()
    results: dict[int, deque[Result]] = {}
    with path.open("rb") as file:
        rounds = counts(messages(file, path))
    with path.open("rb") as file, open_driven(plan) as engine:
        for message in messages(file, path):
            match message:
                case Ready():
                    check(message, plan, path)
                    plans.add(message.plan)
                    engine.forget()
                    results, life = {}, life + 1
                case Step():
                    count = max(1, rounds[life, message.id])
                    results[message.id] = deque(found.run(engine, message, count))
                case Result() if results.get(message.id):
                    found.compare(results[message.id].popleft(), message)
    if not found.steps:
        raise ValueError(f"{path}: no Step is in this log")
    for other in sorted(plans - {plan.id, ""}):
        print(
            f"{path} was recorded with plan {other}, and this is plan {plan.id}: other options, "
            "another machine or another version; times and close tokens may differ",
            file=sys.stderr,
        )
    report(found, as_json)
    return 1 if found.differences else 0


def counts(log: Iterable[Message]) -> Counter[tuple[int, int]]:
    """How many rounds of a Step were run, by the worker's life and the Step's id."""
    from voltapile.workers.protocol import Ready, Result

    found, life = Counter[tuple[int, int]](), 0
    for message in log:
        life += isinstance(message, Ready)
        if isinstance(message, Result):
            found[life, message.id] += 1
    return found


def messages(file: Any, path: Path) -> Iterator[Message]:
    from voltapile.workers import steplog
    from voltapile.workers.protocol import ProtocolError, decode

    for number, frames in enumerate(steplog.read(file)):
        try:
            yield decode(frames)
        except ProtocolError as error:
            raise ValueError(f"{path}: message {number} of the log: {error}") from error


def check(ready: Ready, plan: Plan, path: Path) -> None:
    """The recording's slots and pages must exist. Raises ValueError."""
    pages = [group.pages for group in plan.caches]
    is_like = len(pages) == len(ready.pages) and plan.slots >= ready.slots
    if is_like and all(ours >= theirs for ours, theirs in zip(pages, ready.pages, strict=True)):
        return
    raise ValueError(
        f"{path} was recorded with {ready.slots} slots and pages {ready.pages}, but this plan has "
        f"{plan.slots} and {pages}: give the model and options of the recording, or its --plan"
    )


def outcome(result: Result) -> list[tuple[int, list[int], str]]:
    return [(row.slot, row.tokens, row.finish) for row in result.rows]


def report(found: Replay, as_json: bool) -> None:
    summary = found.summary()
    if as_json:
        print(json.dumps(summary))
        return
    print(
        "{steps} steps, {prompt_tokens} prompt tokens, {generated} generated in {seconds} s "
        "({tok_s} tok/s; recorded {recorded_seconds} s)".format(**summary)
    )
    for text in found.differences[:3]:
        print(text)
    same = found.compared - len(found.differences)
    print(f"{same} of {found.compared} results give the recorded tokens")
