"""Costs: how long a Step will take, learnt from those before it. Plain numbers, no clock.

A Step with `decodes` tokens of running streams and some prompt tokens is taken to last

    base(decodes) + tokens * a + (sum of the tokens' positions) * b

where later Steps count more than earlier ones. Before anything is known a prompt costs infinitely
much, and what cannot be told apart is put down to the prompt: the error is on the safe side.
"""

from __future__ import annotations

from math import inf

import msgspec

WEIGHT = 0.3  # of the newest Step in what a decode takes
FADING = 0.8  # of the older Steps in what a prompt takes, with each new one
LEAST_SPREAD = 1e-3  # below it tokens and positions have gone together, and b is not known


class Load(msgspec.Struct):
    """What a Step does."""

    decodes: int = 0
    tokens: int = 0  # of prompts
    positions: float = 0.0  # the sum of theirs

    def add(self, start: int, end: int) -> None:
        """A piece of a prompt."""
        self.tokens += end - start
        self.positions += (end - start) * (start + end) / 2


class Costs:
    def __init__(self) -> None:
        self.widest = 0  # most prompt tokens of a Step so far; far beyond it nothing is known
        self._bases: dict[int, float] = {}
        self._token = inf  # a
        self._position = 0.0  # b
        self._tt = self._tp = self._pp = self._ty = self._py = 0.0  # sums of products

    def base(self, decodes: int) -> float:
        """Seconds of a Step without a prompt."""
        if not self._bases or not decodes:
            return 0.0
        return self._bases[min(self._bases, key=lambda known: abs(known - decodes))]

    def piece(self, start: int, end: int) -> float:
        """Seconds that prompt tokens at these positions add."""
        tokens = end - start
        return tokens * (self._token + self._position * (start + end) / 2)

    def observe(self, load: Load, seconds: float) -> None:
        if seconds <= 0.0:
            return
        if load.tokens:
            self.widest = max(self.widest, load.tokens)
            self._fit(load, max(0.0, seconds - self.base(load.decodes)))
        elif load.decodes in self._bases:
            self._bases[load.decodes] += WEIGHT * (seconds - self._bases[load.decodes])
        elif load.decodes:
            self._bases[load.decodes] = seconds

    def _fit(self, load: Load, seconds: float) -> None:
        """Least squares; neither price is negative."""
        t, p = float(load.tokens), load.positions
        self._tt = FADING * self._tt + t * t
        self._tp = FADING * self._tp + t * p
        self._pp = FADING * self._pp + p * p
        self._ty = FADING * self._ty + t * seconds
        self._py = FADING * self._py + p * seconds
        spread = self._tt * self._pp - self._tp * self._tp
        if spread > LEAST_SPREAD * self._tt * self._pp:
            self._token = (self._ty * self._pp - self._py * self._tp) / spread
            self._position = (self._py * self._tt - self._ty * self._tp) / spread
            if self._token >= 0.0 and self._position >= 0.0:
                return
        if self._pp and self._token < 0.0:
            self._token, self._position = 0.0, self._py / self._pp
        else:
            self._token, self._position = self._ty / self._tt, 0.0
