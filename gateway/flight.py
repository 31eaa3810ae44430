"""Flight: a Step that has left and has not been answered whole; how many rounds a Step may have.

A Step of several rounds spares the gateway a Step a token. Its rounds are counted as computed when
it leaves; those that a Hold or an ended row cuts off are given back when that is known. No other
Step leaves meanwhile, so that each knows which positions it computes.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from voltapile.gateway.costs import Load
from voltapile.gateway.request import Request
from voltapile.workers.protocol import Hold, ProtocolError, Result

ROUNDS = 32  # most of a Step


class Flight(msgspec.Struct):
    """load: of its next round. left: rounds without a Result. is_held: they may be fewer, as a Hold
    has left behind it."""

    step: int
    load: Load
    # By slot: the rows that will answer. None: the answer is of no use.
    sampling: dict[int, Request | None] = {}
    silent: list[Request] = []  # of the rows that will not
    left: int = 1
    is_held: bool = False

    @property
    def is_certain(self) -> bool:
        """What it leaves behind is known, so that another Step can follow."""
        return self.left == 1 and not self.is_held

    def add(self, rounds: int) -> None:
        """So many rounds more."""
        self.left += rounds
        for request in self.sampling.values():
            if request is not None:
                request.computed += rounds
                request.ahead += rounds

    def hold(self) -> Hold | None:
        """What ends it early; None: it ends with the next round, or has been told."""
        if self.is_held or self.left == 1:
            return None
        self.is_held = True
        return Hold(step=self.step)

    def answered(self, result: Result) -> Load:
        """Some rounds have a Result; those that do not follow are taken back. Returns what the
        first of them did."""
        lost = self.left - result.rounds - result.left
        if result.rounds < 1 or result.left < 0 or lost < 0:
            raise ProtocolError(
                f"{result.rounds} rounds and {result.left} left where {self.left} are at most"
            )
        if lost:
            self.add(-lost)
        self.left -= result.rounds
        done, self.load = self.load, Load(len(self.sampling))  # of prompts only the first has any
        return done


def spare_rounds(requests: Iterable[Request], block: int) -> int:
    """So many rounds more can be computed for all of these, whose first one is counted already,
    without a page, a mask or a copy. block: states may be kept at its multiples; 0: there are none.
    """
    most = ROUNDS - 1
    for request in requests:
        if request.guide is not None or request.limit is not None:
            return 0
        most = min(
            most,
            request.room - request.computed,
            request.sampling.max_position - request.total,
        )
        if block:
            most = min(most, -request.computed % block - 1)
    return max(0, most)
