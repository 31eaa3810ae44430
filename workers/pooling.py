"""Pooled: one vector for a prompt, from the hidden states of its tokens, row by row as they come.

Plain numpy over what somebody else has computed. Knows neither models nor slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

MEAN = "mean"
KINDS = {1: MEAN, 2: "first", 3: "last"}  # GGUF's pooling_type; 2 is called CLS there


def pooling_of(metadata: Mapping[str, Any], architecture: str) -> str:
    """As the file says; the mean where it says nothing, or nothing that this could be."""
    return KINDS.get(int(metadata.get(f"{architecture}.pooling_type", 1)), MEAN)


class Pooled:
    """vector: float32 [D], once all of the prompt has come."""

    def __init__(self, prompt_tokens: int, kind: str) -> None:
        self.prompt_tokens, self.kind = prompt_tokens, kind
        self._sum: np.ndarray | None = None  # or the one that is taken

    def needs(self, start: int) -> bool:
        """A row that begins there holds some of the prompt."""
        return start < self.prompt_tokens

    def add(self, start: int, hidden: np.ndarray) -> None:
        """hidden [n, D] of the tokens from position `start` on."""
        rows = hidden[: self.prompt_tokens - start].astype(np.float64)
        if self.kind == MEAN:
            total = rows.sum(axis=0)
            self._sum = total if self._sum is None or start == 0 else self._sum + total
        elif self.kind == "last":
            self._sum = rows[-1]
        elif start == 0:
            self._sum = rows[0]

    @property
    def vector(self) -> np.ndarray:
        assert self._sum is not None, "no row has come"
        scale = self.prompt_tokens if self.kind == MEAN else 1
        return (self._sum / scale).astype(np.float32)
