"""Outbox: Results that wait for the next ones, so that the gateway wakes up for several at once.

What a token costs the gateway is mostly what a wake-up costs: caches are cold after each pause
(docs/benchmarks.md). Only a Result that further rounds follow may wait, and only as long as the
next one is expected in time; whatever the gateway has to act on goes out at once, and so does what
answers a prompt. It sends nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from voltapile.workers.protocol import Result, Step


class Outbox:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: Result | None = None
        self._emptied_at = -math.inf

    def put(self, result: Result, step: Step) -> list[Result]:
        """What is to be sent now: nothing, or all there is. step: the round that gave it."""
        now = self._clock()
        expected = now + result.seconds
        due = [result]
        if self._waiting is not None:
            # An error ends what its request's reader sees: the tokens before it come before it.
            is_apart = any(row.error for row in result.rows)
            due = [self._waiting, result] if is_apart else [join(self._waiting, result)]
        # At one round left the gateway sends the next Step, so that no pause comes between. A first
        # token is waited for most, and what its round took tells what prompts take.
        is_urgent = result.left < 2 or any(len(row.tokens) for row in step.rows)
        if not is_urgent and expected - self._emptied_at < step.interval:
            [self._waiting] = due
            return []
        self._waiting, self._emptied_at = None, now
        return due


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
