"""Residual streams and n-gram embeddings in plain numpy; see kernels/families.py."""

from __future__ import annotations

import numpy as np
from voltapile.kernels.families import (
    MAX_PROVISIONAL,
    MixWeights,
    NGramHash,
    NGramWeights,
    stream_in,
)
from voltapile.kernels.ops import Array, Batch, Weight
from voltapile.kernels.reference.experts import sigmoid, silu
from voltapile.kernels.reference.ops import ReferenceOps
from voltapile.kernels.reference.ragged import rows_of
from voltapile.kernels.reference.states import State


class ReferenceStreams(ReferenceOps):
    def streams(self, x: np.ndarray, count: int) -> Array:
        return np.tile(x, (1, count))

    def stream_in(
        self,
        x: np.ndarray,
        before: tuple[np.ndarray, np.ndarray] | None,
        mix: MixWeights,
        width: int,
        eps: float,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        return stream_in(self, x, before, mix, width, eps)  # type: ignore[arg-type]

    def stream_norm(self, x: np.ndarray, weight: Weight, width: int, eps: float) -> Array:
        runs = x.reshape(len(x), x.shape[1] // width, width)
        mean = np.mean(runs * runs, axis=-1, keepdims=True)
        return (runs / np.sqrt(mean + np.float32(eps))).reshape(x.shape) * _flat(self, weight)

    def stream_mix(self, x: np.ndarray, gate: np.ndarray, width: int) -> Array:
        return np.mean((x * sigmoid(gate)).reshape(len(x), x.shape[1] // width, width), axis=1)

    def stream_add_(self, x: np.ndarray, inject: np.ndarray, y: np.ndarray) -> Array:
        factors = 2 * sigmoid(inject / np.float32(inject.shape[1]))
        x += (factors[:, :, None] * y[:, None, :]).reshape(x.shape)
        return x

    def silu_(self, x: np.ndarray, scale: float = 1.0) -> Array:
        x[...] = silu(x * np.float32(scale))
        return x

    # --- n-grams --------------------------------------------------------------------------
    def ngram_rows(self, batch: Batch, hashing: NGramHash) -> Array:
        assert batch.history is not None
        order = len(hashing.multipliers)
        heads = len(hashing.moduli) // (order - 1)
        rows = np.zeros((len(batch.tokens), len(hashing.moduli)), np.int64)
        for t, slot in enumerate(batch.slots):
            hashed, is_over = 0, False
            for n in range(order):
                at = batch.positions[t] - n
                token = int(batch.history[slot, at]) if at >= 0 else hashing.boundary
                is_over |= n > 0 and token == hashing.boundary
                token = hashing.boundary if is_over else token
                hashed ^= token * hashing.multipliers[n] % 2**64
                for head in range((n - 1) * heads, n * heads):
                    rows[t, head] = hashed % hashing.moduli[head] + hashing.offsets[head]
        return rows

    def ngram_expect(self, table: Weight, tokens: np.ndarray, hashing: NGramHash) -> None:
        """The system reads a mapped file when it is looked at."""

    def ngram_gather(self, table: Weight, rows: np.ndarray) -> Array:
        return self.embed(table, rows.reshape(-1)).reshape(len(rows), -1)

    def ngram_state(self, slots: int, width: int, rows: int) -> State:
        history = self.zeros((slots, rows, width), np.float32)
        return State([history], [self.zeros((slots, MAX_PROVISIONAL, width), np.float32)])

    def ngram_add_(
        self,
        x: np.ndarray,
        key: np.ndarray,
        value: np.ndarray,
        weights: NGramWeights,
        state: State,
        batch: Batch,
        eps: float,
    ) -> Array:
        width, count = value.shape[1], x.shape[1] // value.shape[1]
        key = self.stream_norm(key, weights.norm_key, width, eps)
        query = self.stream_norm(x, weights.norm_query, width, eps)
        score = (key * query).reshape(len(x), count, width).sum(-1) / np.float32(np.sqrt(width))
        factor = sigmoid(np.sign(score) * np.sqrt(np.maximum(np.abs(score), np.float32(1e-6))))
        added = (factor[:, :, None] * value[:, None, :]).reshape(x.shape)
        normed = self.stream_norm(added, weights.norm_conv, width, eps)
        taps = self.dense(weights.conv1d)
        for start, stop in rows_of(batch.slots):
            row, slot = normed[start:stop], int(batch.slots[start])
            seen = np.concatenate([_history(state, slot, batch, start), row])
            depth = len(seen) - len(row)
            shifts = [depth - i * weights.dilation for i in reversed(range(taps.shape[1]))]
            parts = (taps[:, j] * seen[at : at + len(row)] for j, at in enumerate(shifts))
            added[start:stop] += silu(sum(parts))
            if batch.is_provisional:
                state.values[0][slot] = seen[:depth]
                state.note(slot, [row])
            else:
                state.values[0][slot] = seen[len(row) :]
        x += added
        return x


def _history(state: State, slot: int, batch: Batch, start: int) -> Array:
    """The inputs before a row: what the state has, and what stands of a provisional step."""
    if batch.positions[start] == 0:
        state.logged[slot] = 0
        return np.zeros_like(state.values[0][slot])
    (stands,) = state.take_log(slot, batch.kept)
    return np.concatenate([state.values[0][slot], stands])[len(stands) :]


def _flat(ops: ReferenceOps, weight: Weight) -> Array:
    return ops.dense(weight).reshape(-1)
