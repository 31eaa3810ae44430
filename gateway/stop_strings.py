"""Cuts an answer at the first of its stop strings, however the text arrives in pieces.

Text that may be the beginning of a stop string is held back until the next piece decides. It
knows characters only, not tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The match that is complete first wins, of several that end there the longest; nothing of it
    nor of what follows is emitted."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""  # a match cannot begin before it
        self._stopped = False
        self.met = ""  # the one that ended the answer

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is certain to be part of the answer, whether a stop string was met)."""
        if self._stopped:
            return "", True
        self._held += text
        matches = [
            (at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0
        ]
        self._stopped = bool(matches)
        if matches:
            end, keep = min(matches)
            self.met = self._held[keep:end]
        else:
            keep = self._first_open()
        emit, self._held = self._held[:keep], "" if matches else self._held[keep:]
        return emit, self._stopped

    def flush(self) -> str:
        """At the end: the text that was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_open(self) -> int:
        """Where the longest end of _held begins that could still become a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for at in range(max(0, len(self._held) - longest), len(self._held)):
            if any(stop.startswith(self._held[at:]) for stop in self._stops):
                return at
        return len(self._held)
