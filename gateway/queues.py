"""Queues: requests that have no slot, a line for each client, and whose turn it is.

Within a client they stand by arrival. Between clients a turn is a small piece of work, and goes
to whoever has gone without one for longest, so that a long prompt holds up nobody but its client.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from voltapile.gateway.request import Request


class Queues:
    def __init__(self) -> None:
        self._lines: dict[str, deque[Request]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[Request]:
        for line in self._lines.values():
            yield from line

    @property
    def clients(self) -> Iterable[str]:
        return self._lines.keys()

    def of(self, client: str) -> Iterable[Request]:
        return self._lines.get(client, ())

    def add(self, request: Request) -> None:
        self._lines.setdefault(request.client, deque()).append(request)

    def put_back(self, request: Request) -> None:
        """To its old place: before all that came later."""
        line = self._lines.setdefault(request.client, deque())
        place = (n for n, other in enumerate(line) if other.id > request.id)
        line.insert(next(place, len(line)), request)

    def remove(self, request: Request) -> None:
        line = self._lines[request.client]
        line.remove(request)
        if not line:
            del self._lines[request.client]


class Turns:
    """Who goes first among clients that want something. Who is new goes behind all others."""

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[str, int] = {}
        self._odd: set[str] = set()

    def set(self, clients: Iterable[str]) -> None:
        """Those that want something now; others are forgotten."""
        self._last = {client: self._last.get(client, self._turn) for client in clients}
        self._odd &= self._last.keys()

    def next(self, clients: Iterable[str]) -> str:
        return min(clients, key=self._last.__getitem__)

    def is_odd(self, client: str) -> bool:
        """It has had an odd number of turns."""
        return client in self._odd

    def took(self, client: str) -> None:
        self._turn += 1
        self._last[client] = self._turn
        self._odd ^= {client}
