"""PromptScores: log-probabilities of the tokens of one request's prompt, row by row as it comes.

Plain numpy over logits that somebody else has computed. Knows neither models nor slots.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

BLOCK = 256  # values of which only the largest is looked at first
Pairs = list[tuple[int, float]]  # (id, log-probability)


class PromptScores:
    """found[i] is about the token at position i: itself first, then the `count` best.

    It is empty where the position before was not computed: at 0, and in a reused prefix.
    """

    def __init__(self, prompt_tokens: int, count: int) -> None:
        self.prompt_tokens, self.count = prompt_tokens, count
        self.found: list[Pairs] = []
        self._before: np.ndarray | None = None  # logits after the token before the next one

    def needs(self, start: int) -> bool:
        """A row that begins there holds some of the prompt."""
        return start < self.prompt_tokens

    def add(self, start: int, tokens: np.ndarray, logits: Iterable[np.ndarray]) -> None:
        """A row's tokens, and the logits [n, V] after each of them in pieces."""
        if start != len(self.found):
            self.found += [[] for _ in range(start - len(self.found))]
            self._before = None
        rows = (row for piece in logits for row in piece)
        for token, after in zip(tokens.tolist(), rows, strict=True):
            if len(self.found) < self.prompt_tokens:
                self.found.append(self._pairs(token))
            self._before = after

    def _pairs(self, token: int) -> Pairs:
        if self._before is None:
            return []
        shifted = self._before - self._before.max()
        total = np.log(np.exp(shifted).sum(dtype=np.float64))
        ids = [token, *best(shifted, self.count)]
        return [(i, float(shifted[i] - total)) for i in ids]


def best(values: np.ndarray, count: int) -> list[int]:
    """Ids of the `count` largest, largest first, equal ones by id; never one of -inf."""
    if count <= 0:
        return []
    # So many blocks have a value as large as the least of their largest: a bound for one pass more.
    blocks = len(values) // BLOCK
    firsts = values[: blocks * BLOCK].reshape(blocks, BLOCK).max(axis=1) if blocks else values
    firsts = values if len(firsts) < count else firsts
    most = min(count, len(firsts))
    ids = np.flatnonzero(values >= np.partition(firsts, -most)[-most])
    ids = ids[values[ids] > -np.inf]
    order = np.argsort(-values[ids], kind="stable")[:count]
    return [int(i) for i in ids[order]]
