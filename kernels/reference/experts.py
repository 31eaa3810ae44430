"""Routed experts in plain numpy, and the gates that go with them; see kernels/families.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from voltapile.kernels.families import SharedExpert, add_shared
from voltapile.kernels.ops import Array, Batch, Weight
from voltapile.kernels.reference.ops import ReferenceOps


@dataclass(eq=False)
class ExpertTable:
    """Experts `first` to first + len(gate) - 1 of a layer."""

    gate: Weight
    up: Weight
    down: Weight
    first: int


class ReferenceExperts(ReferenceOps):
    def expert_table(self, gate: Weight, up: Weight, down: Weight, first: int) -> ExpertTable:
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
        logits = (to_bf16(x) if is_rounded else x) @ self.dense(router).T
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        chosen = np.argsort(-shares, axis=1, kind="stable")[:, :used].astype(np.int32)
        weights = np.take_along_axis(shares, chosen, axis=1)
        np.add.at(counts[1], chosen[: batch.generated].reshape(-1), 1)
        np.add.at(counts[0], chosen[batch.generated :].reshape(-1), 1)
        return chosen, weights / weights.sum(axis=1, keepdims=True)

    def experts(
        self,
        x: np.ndarray,
        routing: tuple[np.ndarray, np.ndarray],
        table: ExpertTable,
        add_to: np.ndarray | None = None,
        shared: SharedExpert | None = None,
    ) -> Array:
        chosen, weights = routing
        gate, up, down = (self.dense(each) for each in (table.gate, table.up, table.down))
        y = np.zeros_like(x)
        for rank in range(chosen.shape[1]):  # in the order of routing, whatever expert it is
            for expert in np.unique(chosen[:, rank]):
                local = expert - table.first
                if 0 <= local < len(gate):
                    rows = np.flatnonzero(chosen[:, rank] == expert)
                    inner = silu(x[rows] @ gate[local].T) * (x[rows] @ up[local].T)
                    y[rows] += weights[rows, rank, None] * (inner @ down[local].T)
        if add_to is not None:
            add_to += y
            y = add_to
        return y if shared is None else add_shared(self, x, shared, y)

    def gate_rows_(self, y: np.ndarray, x: np.ndarray, weight: Weight) -> Array:
        y *= sigmoid(x @ self.dense(weight).reshape(-1))[:, None]
        return y

    def gate_(self, y: np.ndarray, gate: np.ndarray) -> Array:
        y *= sigmoid(gate)
        return y

    def split_heads(self, x: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
        heads = x.reshape(len(x), -1, 2, dim)
        return heads[:, :, 0].reshape(len(x), -1), heads[:, :, 1].reshape(len(x), -1)


def sigmoid(x: np.ndarray) -> Array:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> Array:
    return x * sigmoid(x)


def to_bf16(x: np.ndarray) -> Array:
    """float32 rounded to the nearest BF16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
