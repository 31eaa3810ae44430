"""Gated delta nets of the CPU backend; see kernels/families.py and csrc/delta.h."""

from __future__ import annotations

import numpy as np
from voltapile.kernels.cpu.ops import CpuOps
from voltapile.kernels.cpu.states import State, new_state
from voltapile.kernels.cpu.weights import flat, turned
from voltapile.kernels.families import MAX_PROVISIONAL, DeltaShape, DeltaWeights
from voltapile.kernels.ops import Batch

GATES = ("silu", "sigmoid")
MAX_DIM = 192  # of a head: what a thread's memory holds


class CpuDelta(CpuOps):
    def delta_state(self, slots: int, shape: DeltaShape) -> State:
        heads, dim = shape.value_heads, shape.dim
        assert 0 < dim <= MAX_DIM, dim
        shapes = (heads, dim, dim), (MAX_PROVISIONAL, heads), (MAX_PROVISIONAL, heads)
        rest = [self._counted((slots, *each), np.float32, "state") for each in shapes]
        return new_state(self._counted, slots, shape.kernel - 1, shape.channels, rest)

    def delta_net(
        self,
        inputs: tuple[np.ndarray, np.ndarray, np.ndarray],
        weights: DeltaWeights,
        shape: DeltaShape,
        state: State,
        batch: Batch,
    ) -> np.ndarray:
        tokens, heads, width = len(batch.slots), shape.value_heads, shape.value_heads * shape.dim
        columns = shape.channels, width, 2 * heads
        for x, count in zip(inputs, columns, strict=True):
            assert x.shape == (tokens, count), (x.shape, tokens, count)
        taps, vectors = turned(weights.conv1d), [weights.a, weights.dt, weights.norm]
        assert taps.shape == (shape.kernel, shape.channels), taps.shape
        assert [len(flat(each)) for each in vectors] == [heads, heads, shape.dim]
        assert shape.gate in GATES, shape.gate
        out = self._scratch.array((tokens, width))
        b, a = (self._scratch.array((tokens, heads)) for _ in range(2))
        self._engine.split_heads(inputs[2], heads, b, a)
        self._engine.delta_net(
            [*inputs[:2], b, a],
            [taps, *map(flat, vectors)],
            list(shape.key_head_of),
            shape.key_heads,
            shape.eps,
            shape.gate == "sigmoid",
            state.inputs,
            state.rest,
            batch,
            out,
        )
        return out
