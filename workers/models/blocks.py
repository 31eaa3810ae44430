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
from voltapile.topology.spec import Rope, Spec, inv_freq


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


class Block(Protocol):
    """One layer."""

    rope: Rope

    def __call__(self, x: Array, angles: Array, batch: Batch, cache: LayerCache) -> None:
        """Add what the layer computes to the residual stream x [T, D]."""


class Decoder(Model):
    """Token embedding, layers one after another, a norm and the output matrix."""

    @abstractmethod
    def block(self, spec: Spec, weights: Weights, layer: int, ops: Ops) -> Block: ...

    def __init__(self, spec: Spec, weights: Weights, ops: Ops) -> None:
        self.spec, self.ops = spec, ops
        self.token_embd = weights("token_embd.weight")
        self.blk = [self.block(spec, weights, i, ops) for i in range(spec.layers)]
        self.output_norm = weights("output_norm.weight")
        self.output = self.token_embd if spec.tied else weights("output.weight")
        self.output_bias = weights.optional("output.bias")
        self.ropes = {block.rope: _frequencies(block.rope, weights) for block in self.blk}

    def forward(
        self, batch: Batch, caches: Sequence[LayerCache], taps: Collection[int] = ()
    ) -> tuple[Array, dict[int, Array]]:
        ops = self.ops
        x = ops.embed(self.token_embd, batch.tokens, self.spec.embedding_scale)  # [T, D]
        angles = {
            rope: ops.rope_angles(batch.rope_positions, frequencies, scale)
            for rope, (frequencies, scale) in self.ropes.items()
        }
        tapped = {0: ops.copy(x)} if 0 in taps else {}
        for i, block in enumerate(self.blk):
            block(x, angles[block.rope], batch, caches[i])
            if i + 1 in taps:
                tapped[i + 1] = ops.copy(x)
        last = ops.gather(x, batch.outputs)  # [R, D]
        return ops.rms_norm(last, self.output_norm, self.spec.eps), tapped

    def head(self, hidden: Array) -> Array:
        logits = self.ops.linear(hidden, self.output, self.output_bias)
        cap = self.spec.logit_softcap
        return self.ops.softcap_(logits, cap) if cap else logits


class PreNormBlock:
    """x += attention(norm(x)); x += FFN(norm(x)), with SwiGLU."""

    def __init__(self, spec: Spec, weights: Weights, layer: int, ops: Ops) -> None:
        self.ops, self.eps, self.rope = ops, spec.eps, spec.rope_of(layer)
        self.attn_norm = weights(f"blk.{layer}.attn_norm.weight")
        self.attention = Attention(spec, weights, layer, ops)
        self.ffn_norm = weights(f"blk.{layer}.ffn_norm.weight")
        self.ffn = DenseFFN(weights, layer, ops)

    def __call__(self, x: Array, angles: Array, batch: Batch, cache: LayerCache) -> None:
        ops = self.ops
        with ops.scope():
            h = ops.rms_norm(x, self.attn_norm, self.eps)
            self.attention(h, angles, batch, cache, add_to=x)
        with ops.scope():
            h = ops.rms_norm(x, self.ffn_norm, self.eps)
            self.ffn(h, "silu", add_to=x)


class Attention:
    """Grouped-query attention; q and k are normed by head where the file has weights for it."""

    def __init__(self, spec: Spec, weights: Weights, layer: int, ops: Ops) -> None:
        blk = f"blk.{layer}"
        self.ops, self.eps = ops, spec.eps
        (self.attn_q, self.attn_k, self.attn_v), self.attn_qkv_bias = qkv(spec, weights, blk)
        self.attn_q_norm = weights.optional(f"{blk}.attn_q_norm.weight")
        self.attn_k_norm = weights.optional(f"{blk}.attn_k_norm.weight")
        self.attn_output = weights(f"{blk}.attn_output.weight")
        self.attn_output_bias = weights.optional(f"{blk}.attn_output.bias")
        self.layout = spec.rope_of(layer).layout
        self.head_map = [h * spec.kv_heads // spec.heads for h in range(spec.heads)]
        self.scale, self.window = spec.attention_scale, spec.cache_of(layer).window

    def __call__(
        self,
        h: Array,
        angles: Array,
        batch: Batch,
        cache: LayerCache,
        add_to: Array | None = None,
    ) -> Array:
        ops = self.ops
        matrices = self.attn_q, self.attn_k, self.attn_v
        q, k, v = ops.linears(h, matrices, self.attn_qkv_bias)
        q = ops.rope_store(
            q,
            k,
            v,
            angles,
            self.layout,
            cache.kv,
            batch,
            cache.group,
            self.eps,
            self.attn_q_norm,
            self.attn_k_norm,
        )
        o = ops.attention(q, cache.kv, batch, cache.group, self.head_map, self.scale, self.window)
        return ops.linear(o, self.attn_output, self.attn_output_bias, add_to)


class DenseFFN:
    """down(activation(gate h) * up h)."""

    def __init__(self, weights: Weights, layer: int, ops: Ops) -> None:
        blk = f"blk.{layer}"
        self.ops = ops
        self.ffn_gate = weights(f"{blk}.ffn_gate.weight")
        self.ffn_up = weights(f"{blk}.ffn_up.weight")
        self.ffn_down = weights(f"{blk}.ffn_down.weight")
        self.ffn_gate_bias = weights.optional(f"{blk}.ffn_gate.bias")
        self.ffn_up_bias = weights.optional(f"{blk}.ffn_up.bias")
        self.ffn_down_bias = weights.optional(f"{blk}.ffn_down.bias")

    def __call__(self, h: Array, activation: str, add_to: Array | None = None) -> Array:
        inner = self.ops.glu(
            h, self.ffn_gate, self.ffn_up, activation, self.ffn_gate_bias, self.ffn_up_bias
        )
        return self.ops.linear(inner, self.ffn_down, self.ffn_down_bias, add_to)


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


def _frequencies(rope: Rope, weights: Weights) -> tuple[np.ndarray, float]:
    return inv_freq(rope, weights.host(rope.factors_tensor) if rope.factors_tensor else None)
