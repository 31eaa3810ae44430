"""Routing: how often each expert was chosen since the worker began, for whoever reads its metrics.

Every step counts on the device; now and then the counts come with a Result, some layers at a time.
Knows neither requests nor why an expert was chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice

import numpy as np
from voltapile.kernels.ops import Array

SECONDS = 5.0  # between two looks, while steps are computed
MOST_BYTES = 256 << 10  # of a look
PHASES = ("prompt", "decode")
BUSIEST = 8  # one of so many experts counts among the busiest


class Routing:
    """Asked for each step what it shall bring, and told what it has brought. counters: see
    Model.counters."""

    def __init__(self, counters: Mapping[int, Array]) -> None:
        self._counters = dict(counters)
        largest = max((array.nbytes for array in self._counters.values()), default=1)
        self._at_once = min(len(self._counters), max(1, MOST_BYTES // largest))
        self._layers = cycle(self._counters)
        self._due = 0.0
        self._seen: dict[int, np.ndarray] = {}

    def due(self, now: float) -> list[int]:
        """The layers whose counters the step shall bring; mostly none."""
        if now < self._due or not self._counters:
            return []
        self._due = now + SECONDS * self._at_once / len(self._counters)
        return list(islice(self._layers, self._at_once))

    def arrays(self, layers: Sequence[int]) -> list[Array]:
        return [self._counters[layer] for layer in layers]

    def take(self, layers: Sequence[int], values: Sequence[np.ndarray]) -> None:
        self._seen = {**self._seen, **dict(zip(layers, values, strict=True))}

    def choices(self) -> dict[str, int]:
        """Of all layers, by phase."""
        totals = sum((each.sum(axis=1) for each in self._seen.values()), np.zeros(2, np.int64))
        return dict(zip(PHASES, totals.tolist(), strict=True)) if self._seen else {}

    def shares(self) -> dict[tuple[int, str], float]:
        """By layer and phase: which part of the choices an eighth of the experts had, the busiest
        ones. Where all are alike it is an eighth."""
        found = {}
        for layer, counts in sorted(self._seen.items()):
            busiest = -(-counts.shape[1] // BUSIEST)
            for phase, own in zip(PHASES, counts, strict=True):
                if total := int(own.sum()):
                    found[layer, phase] = float(np.sort(own)[-busiest:].sum() / total)
        return found
