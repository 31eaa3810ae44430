"""ThoughtLimit: how long a model may reason before its end marker is forced upon it.

Told what was generated so far, it says which token must come next; it remembers nothing, so that a
preempted or replayed answer goes on as it would have. It knows token ids and their bytes only.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThoughtLimit:
    """budget: tokens of reasoning. opens, closes: the markers as ids; opens is empty where the
    prompt has opened the reasoning. mark: the closing one's bytes. text: of ids."""

    budget: int
    opens: tuple[int, ...]
    closes: tuple[int, ...]
    mark: bytes
    text: Callable[[Sequence[int]], bytes]

    def is_due(self, count: int) -> bool:
        """What comes after so many tokens depends on all of them."""
        return count >= self.budget + len(self.opens)

    def forced(self, generated: Sequence[int]) -> int:
        """The token that must follow, or -1."""
        start = len(self.opens)
        if not self.is_due(len(generated)) or tuple(generated[:start]) != self.opens:
            return -1
        text = self.text(generated[start:])
        if self.mark in text or _is_half(text[-4:]):
            return -1
        closes = self.closes
        sizes = range(len(closes))
        done = max(n for n in sizes if tuple(generated[len(generated) - n :]) == closes[:n])
        return closes[done]


def _is_half(end: bytes) -> bool:
    """A character has begun and is not complete."""
    return codecs.utf_8_decode(end, "replace", False)[1] < len(end)
