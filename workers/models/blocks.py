"""What several models share: how a model gets its weights and caches, and common blocks.

Attributes are named after the GGUF tensors. Knows Ops and Spec; neither backend nor ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from voltapile.kernels.ops import Array, Batch, Ops, Weight
from voltapile.topology.spec import Spec


class Weights(Protocol):
    """Hands out a file's tensors in the backend's form."""

    def __call__(self, name: str) -> Weight: ...

    def optional(self, name: str) -> Weight | None: ...

    def rows(self, name: str, start: int, stop: int) -> Weight | None:
        """Rows of a matrix or elements of a vector; None if there is no such tensor."""

    def has(self, name: str) -> bool: ...

    def host(self, name: str) -> np.ndarray:
        """float32 values of a small tensor."""


class LayerCache(Protocol):
    """Where a layer keeps its keys and values: an opaque cache and its group of pages."""

    kv: Any
    group: int


class Model(ABC):
    """A whole model on one rank."""

    @abstractmethod
    def __init__(self, spec: Spec, weights: Weights, ops: Ops) -> None: ...

    @abstractmethod
    def forward(
        self, batch: Batch, caches: Sequence[LayerCache], taps: Collection[int] = ()
    ) -> tuple[Array, dict[int, Array]]:
        """Run the batch through all layers and store its keys and values.

        Returns the normalised hidden states [R, D] of batch.outputs, which `head` turns into
        logits, and copies of the residual stream [T, D] at the layer boundaries in taps
        (0: the embedding, i: after layer i).
        """

    @abstractmethod
    def head(self, hidden: Array) -> Array:
        """Logits [R, V]."""


class DenseFFN:
    """x += down(activation(gate h) * up h)."""

    def __init__(self, weights: Weights, blk: str, ops: Ops) -> None:
        self.ops = ops
        self.ffn_gate = weights(f"{blk}.ffn_gate.weight")
        self.ffn_up = weights(f"{blk}.ffn_up.weight")
        self.ffn_down = weights(f"{blk}.ffn_down.weight")
        self.ffn_gate_bias = weights.optional(f"{blk}.ffn_gate.bias")
        self.ffn_up_bias = weights.optional(f"{blk}.ffn_up.bias")
        self.ffn_down_bias = weights.optional(f"{blk}.ffn_down.bias")

    def __call__(self, x: Array, h: Array, activation: str) -> None:
        inner = self.ops.glu(
            h, self.ffn_gate, self.ffn_up, activation, self.ffn_gate_bias, self.ffn_up_bias
        )
        self.ops.linear(inner, self.ffn_down, self.ffn_down_bias, add_to=x)


def qkv(
    spec: Spec, weights: Weights, blk: str
) -> tuple[tuple[Weight, ...], tuple[Weight | None, ...]]:
    """Weights and biases of q, k and v; a fused attn_qkv is cut into its rows."""
    rows = (
        spec.heads * spec.key_dim,
        spec.kv_heads * spec.key_dim,
        spec.kv_heads * spec.value_dim,
    )
    if not weights.has(f"{blk}.attn_qkv.weight"):
        names = ("attn_q", "attn_k", "attn_v")
        return (
            tuple(weights(f"{blk}.{name}.weight") for name in names),
            tuple(weights.optional(f"{blk}.{name}.bias") for name in names),
        )
    edges = np.cumsum([0, *rows]).tolist()
    parts = list(pairwise(edges))
    cut = [weights.rows(f"{blk}.attn_qkv.weight", a, b) for a, b in parts]
    return (
        tuple(weight for weight in cut if weight is not None),
        tuple(weights.rows(f"{blk}.attn_qkv.bias", a, b) for a, b in parts),
    )
