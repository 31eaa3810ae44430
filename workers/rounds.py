"""Rounds: the Steps that have come and are not begun, and what is left of the one that is.

It turns a Step of several rounds into Steps of one, and ends it early: when it is told to, or when
a row has nothing more to give. It knows neither engine nor socket.
"""

from __future__ import annotations

from collections import deque

from voltapile.workers.protocol import Result, Row, Step


class Rounds:
    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self._rest: Step | None = None  # of the Step that has begun, all its rows continuing
        self._begun: deque[int] = deque()  # ids of the Steps of rounds whose Results are to come

    def __bool__(self) -> bool:
        """There is a next one."""
        return self._rest is not None or bool(self._steps)

    @property
    def is_amid(self) -> bool:
        """The next round is not its Step's first."""
        return self._rest is not None

    def add(self, step: Step) -> None:
        self._steps.append(step)

    def next(self) -> Step:
        """The next round, as a Step."""
        step = self._rest
        if step is None:
            step = self._steps.popleft()
            if step.rounds > 1:
                rows = [Row(slot=row.slot) for row in step.rows]
                left = step.rounds - 1
                self._rest = Step(id=step.id, rounds=left, rows=rows, interval=step.interval)
        else:
            step.rounds -= 1
            if not step.rounds:
                self._rest = None
        self._begun.append(step.id)
        return step

    def hold(self, id: int) -> None:
        """As Hold asks. A Result has to say that no round follows, which may take one more."""
        if self._rest is not None and self._rest.id == id:
            self._rest.rounds = 1
            if id in self._begun:
                self._rest = None
        for step in self._steps:
            if step.id == id:
                step.rounds = 1

    def cut(self) -> None:
        """No Step has more than its first round, and no Result needs to say so."""
        self._rest = None
        for step in self._steps:
            step.rounds = 1

    def settle(self, result: Result) -> None:
        """Say in the oldest round's Result how many of its Step follow."""
        oldest = self._begun.popleft()
        assert oldest == result.id, "Results come in the order of rounds"
        result.left = self._begun.count(result.id)
        if self._rest is not None and self._rest.id == result.id:
            if any(row.finish or not row.tokens for row in result.rows):
                self._rest = None
            else:
                result.left += self._rest.rounds
