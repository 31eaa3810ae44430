"""Outbox: Results that wait for the next ones, so that the gateway wakes up for several at once.

What a token costs the gateway is mostly what a wake-up costs: caches are cold after each pause
(docs/benchmarks.md). Only a Result that further rounds follow may wait, and only as long as the
next one is expected in time; whatever the gateway has to act on goes out at once. It sends nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from voltapile.workers.protocol import Result


class Outbox:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: Result | None = None
        self._emptied_at = 0.0

    def put(self, result: Result, interval: float) -> Result | None:
        """What is to be sent now: nothing, or all there is. interval: as in its Step."""
        now = self._clock()
        expected = now + result.seconds
        if self._waiting is not None:
            result = join(self._waiting, result)
        # At one round left the gateway sends the next Step, so that no pause comes between.
        if result.left > 1 and expected - self._emptied_at < interval:
            self._waiting = result
            return None
        self._waiting, self._emptied_at = None, now
        return result


def join(first: Result, then: Result) -> Result:
    """`first`, which has become the Result of the rounds of both."""
    for row, more in zip(first.rows, then.rows, strict=True):
        assert row.slot == more.slot, "all rounds of a Step have the same rows"
        row.tokens += more.tokens
        row.logprobs += more.logprobs
        row.drafted += more.drafted
        row.accepted += more.accepted
        row.finish, row.error = more.finish, more.error
    first.rounds += then.rounds
    first.seconds += then.seconds
    first.left = then.left
    return first
