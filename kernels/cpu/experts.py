"""Routed experts of the CPU backend, and the gates that go with them; see kernels/families.py.

Makes outputs and scratch, and hands them to the engine. Experts stay where the file has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from voltapile.kernels.cpu import _cpu
from voltapile.kernels.cpu.ops import CpuOps
from voltapile.kernels.cpu.weights import flat, matrix_of
from voltapile.kernels.families import SharedExpert, add_shared
from voltapile.kernels.ops import Batch, Weight


@dataclass(eq=False)
class ExpertTable:
    """Experts `first` to first + count - 1 of a layer."""

    gate: Weight
    up: Weight
    down: Weight
    first: int

    @property
    def count(self) -> int:
        return self.gate.shape[0]


class CpuExperts(CpuOps):
    def expert_table(self, gate: Weight, up: Weight, down: Weight, first: int) -> ExpertTable:
        count, ffn, width = gate.shape
        assert up.shape == gate.shape, (up.shape, gate.shape)
        assert down.shape == (count, width, ffn), (down.shape, gate.shape)
        return ExpertTable(gate, up, down, first)

    def route(
        self,
        x: np.ndarray,
        router: Weight,
        used: int,
        counts: np.ndarray,
        batch: Batch,
        is_rounded: bool = False,
    ) -> tuple[np.ndarray, np.ndarray]:
        count = router.shape[0]
        assert 0 < used <= count == counts.shape[1], (used, count, counts.shape)
        chosen = self._scratch.array((len(x), used), np.int32)
        weights = self._scratch.array((len(x), used))
        with self._scratch.scope():
            if is_rounded:
                rounded = self._scratch.array(x.shape)
                self._engine.round_bf16(x, rounded)
                x = rounded
            logits = self.linear(x, router)
            self._engine.route(logits, batch.generated, chosen, weights, counts)
        return chosen, weights

    def experts(
        self,
        x: np.ndarray,
        routing: tuple[np.ndarray, np.ndarray],
        table: ExpertTable,
        add_to: np.ndarray | None = None,
        shared: SharedExpert | None = None,
    ) -> np.ndarray:
        chosen, weights = routing
        count, ffn, width = table.gate.shape
        assert x.shape[1] == width, (x.shape, table.gate.shape)
        out = self._scratch.array(x.shape) if add_to is None else add_to
        pairs = len(x) * min(chosen.shape[1], count)
        with self._scratch.scope():
            array = self._scratch.array
            self._engine.experts(
                x,
                chosen,
                weights,
                [matrix_of(each) for each in (table.gate, table.up, table.down)],
                count,
                table.first,
                out,
                add_to is not None,
                self._quantised(x),
                array((pairs, ffn)),
                array((_cpu.quantised_bytes(pairs, ffn),), np.uint8),
                array((pairs, width)),
                array((count + 1 + pairs + chosen.size,), np.int32),
            )
        return out if shared is None else add_shared(self, x, shared, out)

    def gate_rows_(self, y: np.ndarray, x: np.ndarray, weight: Weight) -> np.ndarray:
        factor = flat(weight)
        assert x.shape == (len(y), len(factor)), (x.shape, y.shape, factor.shape)
        self._engine.gate_rows(y, x, factor)
        return y

    def gate_(self, y: np.ndarray, gate: np.ndarray) -> np.ndarray:
        assert y.shape == gate.shape, (y.shape, gate.shape)
        self._engine.gate(y, gate)
        return y

    def split_heads(self, x: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
        assert x.shape[1] % (2 * dim) == 0, (x.shape, dim)
        first, second = (self._scratch.array((len(x), x.shape[1] // 2)) for _ in range(2))
        self._engine.split_heads(x, dim, first, second)
        return first, second
