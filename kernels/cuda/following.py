"""What a model multiplies by next, so that a product may ask the cache for it while memory is idle.

A model's products follow each other in the same order in every step. That order is learnt when
they are launched, first while a server rehearses. Knows addresses; changes no result.
"""

from __future__ import annotations

from typing import NamedTuple

NEAR = 2  # products ahead
PIECES = 16 * 16  # of a unit: whole vectors of as many warps as may share it


class Span(NamedTuple):
    """Units of so many bytes, one behind the other."""

    address: int
    size: int
    units: int


NOTHING = Span(0, 0, 0)


class Following:
    """Asks for nothing but ups: of a gate and its up half then comes from the cache and half from
    memory, all the time."""

    def __init__(self) -> None:
        self._next: dict[int, tuple[int, Span]] = {}
        self._last = 0

    def after(self, key: int, up: Span, most: int) -> Span:
        """What the product by `key` shall ask for at its end. up: what it reads beside its gate.
        most: units that it can ask for. Those that are needed first are asked for first."""
        self._next[self._last], self._last = (key, up), key
        for distance in range(1, NEAR + 1):
            key, found = self._next.get(key, (0, NOTHING))
            if found.units:
                return _from(found, (NEAR - distance) * most, most)
        return NOTHING


def _from(span: Span, first: int, most: int) -> Span:
    if span.size % PIECES or span.address % 16 or first >= span.units:
        return NOTHING
    return Span(span.address + first * span.size, span.size, min(most, span.units - first))
