"""Prompts: what is wanted of whole prompts beside their next token, log-probabilities and pooled
hidden states.

Rows of such prompts are computed once more, with an output after each token, before they are
computed the usual way: that stays as it is, finds the states that it would have found, and writes
keys and values again, unchanged. Every rank computes them, one looks at them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from voltapile.kernels.ops import Array, Ops
from voltapile.workers.batch import BatchBuffer
from voltapile.workers.caches import Caches
from voltapile.workers.checkpoints import Checkpoints
from voltapile.workers.models.blocks import Model
from voltapile.workers.pooling import Pooled
from voltapile.workers.protocol import Row, Sampled, Sampling, Want
from voltapile.workers.scoring import PromptScores


@dataclass(frozen=True, slots=True)
class Found:
    """Of one prompt; None: not wanted."""

    scores: PromptScores | None
    pooled: Pooled | None

    def needs(self, start: int) -> bool:
        return any(each.needs(start) for each in (self.scores, self.pooled) if each)

    def give(self, answer: Sampled) -> None:
        if self.scores is not None:
            answer.prompt_logprobs = self.scores.found
        if self.pooled is not None:
            answer.hidden = self.pooled.vector


class Prompts:
    """begin for each request, look for the rows of each Step. most: outputs computed at once."""

    def __init__(
        self, ops: Ops, model: Model, buffer: BatchBuffer, caches: Caches,
        checkpoints: Checkpoints, most: int, answers: bool, pooling: str,
    ) -> None:  # fmt: skip
        self.ops, self.model, self.buffer, self.caches = ops, model, buffer, caches
        self.checkpoints, self.most, self.answers = checkpoints, most, answers
        self.pooling = pooling
        self._found: dict[int, Found] = {}  # by slot

    def begin(self, slot: int, sampling: Sampling, want: Want) -> None:
        self._found.pop(slot, None)
        scores = pooled = None
        if want.prompt_logprobs >= 0:
            scores = PromptScores(sampling.prompt_tokens, want.prompt_logprobs)
        if want.hidden:
            pooled = Pooled(sampling.prompt_tokens, self.pooling)
        if scores or pooled:
            self._found[slot] = Found(scores, pooled)

    def look(self, rows: Sequence[Row]) -> dict[int, Found]:
        """Compute what is wanted of `rows`; gives it, by slot, of prompts that end here."""
        for row in rows:
            found = self._found.get(row.slot)
            if found and len(row.tokens) and found.needs(row.start):
                with self.checkpoints.unchanged(row.slot):
                    self._look(row, found)
        ended = {row.slot for row in rows if row.sample} & self._found.keys()
        return {slot: self._found.pop(slot) for slot in ended}

    def logits(self, slot: int, tokens: np.ndarray, start: int) -> Iterator[np.ndarray]:
        """float32 [n, V] pieces of the logits after each token of one row."""
        hidden = self._hidden(slot, tokens, start)
        return iter(()) if hidden is None else self._heads(hidden)

    def _look(self, row: Row, found: Found) -> None:
        hidden = self._hidden(row.slot, row.tokens, row.start)
        if hidden is None:
            return
        if found.pooled is not None and self.answers:
            found.pooled.add(row.start, self.ops.to_host(hidden))
        if found.scores is not None:
            logits = self._heads(hidden)
            if self.answers:
                found.scores.add(row.start, row.tokens, logits)
            else:
                deque(logits, maxlen=0)

    def _hidden(self, slot: int, tokens: np.ndarray, start: int) -> Array | None:
        self.ops.reset_scratch()
        batch = self.buffer.fill_all_outputs(slot, tokens, start)
        self.ops.begin(batch, self.caches.state)  # which takes down the tokens
        hidden, _ = self.model.forward(batch, self.caches.layers)
        return hidden

    def _heads(self, hidden: Any) -> Iterator[np.ndarray]:
        for first in range(0, len(hidden), self.most):
            with self.ops.scope():
                yield self.ops.to_host(self.model.head(hidden[first : first + self.most]))
