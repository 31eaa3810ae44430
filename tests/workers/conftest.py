"""All ranks of a Plan as threads of one process, which a test drives like one Engine."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
import pytest
from voltapile.shm.board import Board
from voltapile.topology.plan import Plan
from voltapile.workers.engine import Engine, open_engine
from voltapile.workers.protocol import Result, Step

PATIENCE = 60.0
Work = Callable[[Engine], Any]


class Rank(threading.Thread):
    """One rank's Engine, and whatever it is asked to do with it."""

    def __init__(self, plan: Plan, rank: int, board: Board) -> None:
        super().__init__(name=f"rank {rank}")
        self.plan, self.rank, self.board = plan, rank, board
        self.work: queue.SimpleQueue[tuple[Work, Future[Any]] | None] = queue.SimpleQueue()
        self.ready: Future[Engine] = Future()
        self.start()

    def run(self) -> None:
        self.board.join(self.rank)
        try:
            with open_engine(self.plan, self.rank, board=self.board) as engine:
                self.ready.set_result(engine)
                while (task := self.work.get()) is not None:
                    do(task, engine)
        except Exception as error:
            self.board.abort(f"rank {self.rank}: {error}")
            if not self.ready.done():
                self.ready.set_exception(error)


def do(task: tuple[Work, Future[Any]], engine: Engine) -> None:
    work, answer = task
    try:
        answer.set_result(work(engine))
    except Exception as error:
        answer.set_exception(error)


class Ranks:
    """`run` and `prompt_logits` are an Engine's; `each` does the same on every rank, `ask`
    without waiting for it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = msgspec.structs.replace(plan, id=uuid4().hex[:16])
        self.board = Board.create(self.plan.id, len(plan.ranks))
        self.ranks = [Rank(self.plan, rank.rank, self.board) for rank in plan.ranks]
        try:
            self.engines = [rank.ready.result(PATIENCE) for rank in self.ranks]
        except BaseException:
            self.close()
            raise

    def ask(self, work: Work) -> list[Future[Any]]:
        answers: list[Future[Any]] = [Future() for _ in self.ranks]
        for rank, answer in zip(self.ranks, answers, strict=True):
            rank.work.put((work, answer))
        return answers

    def each(self, work: Work) -> list[Any]:
        return [answer.result(PATIENCE) for answer in self.ask(work)]

    def run(self, step: Step) -> Result:
        results: list[Result] = self.each(lambda engine: engine.run(step))
        for rank, result in enumerate(results):
            assert rank == self.plan.answer_rank or not result.rows
        self.check_slots()
        return results[self.plan.answer_rank]

    def check_slots(self) -> None:
        """Every rank knows the same of each slot."""
        states = [engine.caches.state for engine in self.engines]
        for name in ("last_token", "next_position", "finished", "history"):
            for state in states[1:]:
                mine, theirs = getattr(state, name), getattr(states[0], name)
                np.testing.assert_array_equal(mine, theirs, name)

    def prompt_logits(self, tokens: np.ndarray) -> Iterator[np.ndarray]:
        found = self.each(lambda engine: [piece.copy() for piece in engine.prompt_logits(tokens)])
        yield from found[self.plan.answer_rank]

    def close(self) -> None:
        for rank in self.ranks:
            rank.work.put(None)
        for rank in self.ranks:
            rank.join(PATIENCE)
        self.board.close()


@pytest.fixture
def ranks_for(plan_for: Callable[..., Plan]) -> Iterator[Callable[..., Ranks]]:
    """ranks_for(path, backend, **Options fields) -> loaded Ranks."""
    with contextlib.ExitStack() as stack:

        def make(path: Path, backend: str = "reference", **options: Any) -> Ranks:
            return stack.enter_context(
                contextlib.closing(Ranks(plan_for(path, backend, **options)))
            )

        yield make
