"""Residual streams and n-gram embeddings of the CPU backend; see kernels/families.py."""

from __future__ import annotations

import numpy as np
from voltapile.kernels.cpu.ops import CpuOps
from voltapile.kernels.cpu.states import State, new_state
from voltapile.kernels.cpu.weights import flat, matrix_of, turned
from voltapile.kernels.families import MixWeights, NGramHash, NGramWeights, stream_in
from voltapile.kernels.ops import Batch, Weight


class CpuStreams(CpuOps):
    def streams(self, x: np.ndarray, count: int) -> np.ndarray:
        out = self._scratch.array((len(x), count * x.shape[1]))
        self._engine.streams(x, out)
        return out

    def stream_in(
        self,
        x: np.ndarray,
        before: tuple[np.ndarray, np.ndarray] | None,
        mix: MixWeights,
        width: int,
        eps: float,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        return stream_in(self, x, before, mix, width, eps)  # type: ignore[arg-type]

    def stream_norm(self, x: np.ndarray, weight: Weight, width: int, eps: float) -> np.ndarray:
        factors = flat(weight)
        assert x.shape[1] == len(factors), (x.shape, weight.shape)
        assert x.shape[1] % width == 0, (x.shape, width)
        out = self._scratch.array(x.shape)
        self._engine.stream_norm(x, factors, width, eps, out)
        return out

    def stream_mix(self, x: np.ndarray, gate: np.ndarray, width: int) -> np.ndarray:
        assert x.shape == gate.shape, (x.shape, gate.shape)
        assert x.shape[1] % width == 0, (x.shape, width)
        out = self._scratch.array((len(x), width))
        self._engine.stream_mix(x, gate, out)
        return out

    def stream_add_(self, x: np.ndarray, inject: np.ndarray, y: np.ndarray) -> np.ndarray:
        assert x.shape == (len(y), inject.shape[1] * y.shape[1]), (x.shape, inject.shape, y.shape)
        self._engine.stream_add(x, inject, y)
        return x

    def silu_(self, x: np.ndarray, scale: float = 1.0) -> np.ndarray:
        self._engine.silu(x, scale)
        return x

    # --- n-grams --------------------------------------------------------------------------
    def ngram_rows(self, batch: Batch, hashing: NGramHash) -> np.ndarray:
        assert batch.history is not None
        heads = len(hashing.moduli)
        assert heads % (len(hashing.multipliers) - 1) == 0, hashing
        rows = self._scratch.array((len(batch.slots), heads), np.int64)
        multipliers, moduli, offsets = hashing.multipliers, hashing.moduli, hashing.offsets
        self._engine.ngram_rows(batch, multipliers, moduli, offsets, hashing.boundary, rows)
        return rows

    def ngram_expect(self, table: Weight, tokens: np.ndarray, hashing: NGramHash) -> None:
        """The system reads a mapped file when it is looked at."""

    def ngram_gather(self, table: Weight, rows: np.ndarray) -> np.ndarray:
        out = self._scratch.array((len(rows), rows.shape[1] * table.shape[1]))
        self._engine.embed_rows(matrix_of(table), rows, out)
        return out

    def ngram_state(self, slots: int, width: int, rows: int) -> State:
        return new_state(self._counted, slots, rows, width, [])

    def ngram_add_(
        self,
        x: np.ndarray,
        key: np.ndarray,
        value: np.ndarray,
        weights: NGramWeights,
        state: State,
        batch: Batch,
        eps: float,
    ) -> np.ndarray:
        assert x.shape == key.shape, (x.shape, key.shape)
        assert len(x) == len(value) == len(batch.slots), (x.shape, value.shape)
        taps, dilation = turned(weights.conv1d), weights.dilation
        assert state.history.shape[1:] == ((len(taps) - 1) * dilation, x.shape[1])
        norms = [flat(each) for each in (weights.norm_key, weights.norm_query, weights.norm_conv)]
        with self._scratch.scope():
            added, normed = (self._scratch.array(x.shape) for _ in range(2))
            self._engine.ngram_add(
                x,
                key,
                value,
                [*norms, taps],
                dilation,
                state.inputs,
                batch,
                eps,
                added,
                normed,
            )
        return x
