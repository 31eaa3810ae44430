"""Suspects: requests that were being computed when the worker was lost, until they are past it.

Whoever was there alone, and had been there before, must have done it. It knows neither slots nor
Steps: the scheduler tells who was there, and computes suspects one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

from voltapile.gateway.request import Request, State

# What a loss of the worker counts against a request that was there: a fault is hardly another's, a
# process that somebody has killed or stopped may well be. So many in all, and the request ends.
FAULT, KILL, MOST = 3, 1, 6
# Of the rounds that were still to come only so many may have run, their Results lost on the way. If
# there were more the worker is lost again, so much further on.
NEAR = 8


class Suspects:
    def __init__(self) -> None:
        self._requests: set[Request] = set()

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    @property
    def first(self) -> Request:
        return min(self._requests, key=lambda request: request.id)

    def accuse(self, requests: Iterable[Request | None], weight: int) -> list[Request]:
        """The worker was lost while it computed `requests`; returns those that must end. weight:
        FAULT or KILL."""
        for request in set(requests):
            if request is not None and request.state is not State.FINISHED:
                request.crashes += weight
                past = max(request.computed, request.total - 1)
                near = min(past, len(request.known) + NEAR)
                request.crashed_at = max(request.crashed_at, near)
                self._requests.add(request)
        return [request for request in self._requests if request.crashes >= MOST]

    def has_tokens(self, request: Request) -> None:
        """It has got further: perhaps past where the worker was lost."""
        if len(request.known) > request.crashed_at:
            request.crashes = 0
            self._requests.discard(request)

    def remove(self, request: Request) -> None:
        """It has ended."""
        self._requests.discard(request)
