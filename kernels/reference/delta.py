"""Gated delta nets in plain numpy, token after token; see kernels/families.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from voltapile.kernels.families import MAX_PROVISIONAL, DeltaShape, DeltaWeights
from voltapile.kernels.ops import Array, Batch
from voltapile.kernels.reference.experts import sigmoid, silu
from voltapile.kernels.reference.ops import ReferenceOps
from voltapile.kernels.reference.ragged import rows_of
from voltapile.kernels.reference.states import State


class ReferenceDelta(ReferenceOps):
    def delta_state(self, slots: int, shape: DeltaShape) -> State:
        heads, dim = shape.value_heads, shape.dim

        def zeros(*rest: int) -> np.ndarray:
            return self.zeros((slots, *rest), np.float32)

        window = MAX_PROVISIONAL
        return State(
            [zeros(shape.kernel - 1, shape.channels), zeros(heads, dim, dim)],
            [zeros(window, shape.channels), zeros(window, heads), zeros(window, heads)],
        )

    def delta_net(
        self,
        inputs: tuple[np.ndarray, np.ndarray, np.ndarray],
        weights: DeltaWeights,
        shape: DeltaShape,
        state: State,
        batch: Batch,
    ) -> Array:
        m, z, gates = inputs
        b, a = np.split(gates, 2, axis=1)
        conv1d, rate, dt, norm = (
            self.dense(each) for each in (weights.conv1d, weights.a, weights.dt, weights.norm)
        )
        out = np.zeros((len(m), shape.value_heads, shape.dim), np.float32)
        for start, stop in rows_of(batch.slots):
            slot = batch.slots[start]
            history, matrix = (values[slot].copy() for values in state.values)
            if batch.positions[start] == 0:
                history[...], matrix[...], state.logged[slot] = 0, 0, 0
            row = [each[start:stop] for each in (m, b, a)]
            earlier = state.take_log(slot, batch.kept)
            _run(earlier, conv1d, rate, dt, shape, history, matrix)
            if batch.is_provisional:
                state.values[0][slot], state.values[1][slot] = history, matrix
                state.note(slot, row)
            out[start:stop] = _run(row, conv1d, rate, dt, shape, history, matrix)
            if not batch.is_provisional:
                state.values[0][slot], state.values[1][slot] = history, matrix
        mean = np.mean(out * out, axis=-1, keepdims=True)
        y = out / np.sqrt(mean + np.float32(shape.eps)) * norm
        gate = {"silu": silu, "sigmoid": sigmoid}[shape.gate](z)
        return y.reshape(len(m), -1) * gate


def _run(
    row: Sequence[np.ndarray],
    conv1d: np.ndarray,
    rate: np.ndarray,
    dt: np.ndarray,
    shape: DeltaShape,
    history: np.ndarray,
    matrix: np.ndarray,
) -> Array:
    """o [tokens, value heads, dim]; history and matrix go on with the tokens of a row."""
    m, b, a = row
    count, taps = len(m), shape.kernel
    seen = np.concatenate([history, m])
    history[...] = seen[count:]
    c = silu(sum(conv1d[:, j] * seen[j : j + count] for j in range(taps)))
    keys = shape.key_heads * shape.dim
    q, k, v = (
        part.reshape(count, part.shape[1] // shape.dim, shape.dim)
        for part in np.split(c, [keys, 2 * keys], axis=1)
    )
    of, eps = list(shape.key_head_of), np.float32(shape.eps)
    q = (q / np.sqrt((q * q).sum(-1, keepdims=True) + eps) * np.float32(shape.dim**-0.5))[:, of]
    k = (k / np.sqrt((k * k).sum(-1, keepdims=True) + eps))[:, of]
    beta, decay = sigmoid(b), np.exp(rate * np.logaddexp(0, a + dt))
    out = np.zeros((count, shape.value_heads, shape.dim), np.float32)
    for t in range(count):
        matrix *= decay[t, :, None, None]
        error = beta[t, :, None] * (v[t] - np.einsum("hkv,hk->hv", matrix, k[t]))
        matrix += k[t, :, :, None] * error[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", matrix, q[t])
    return out
