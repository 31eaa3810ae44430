"""Architecture "qwen3moe": as qwen3, with routed experts.

Attributes are named after the GGUF tensors. Knows Ops and Spec; neither backend nor ranks.
"""

from __future__ import annotations

from typing import cast

from voltapile.kernels.ops import Array, Batch, Ops
from voltapile.topology.share import Share
from voltapile.topology.spec import Spec
from voltapile.workers.models.blocks import Attention, Decoder, LayerCache, Weights
from voltapile.workers.models.experts import ExpertFFN


class Qwen3Moe(Decoder):
    def block(self, spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops) -> Block:
        return Block(spec, share, weights, layer, ops)

    def counters(self) -> dict[int, Array]:
        blocks = cast(dict[int, Block], self.blk)
        return {layer: block.ffn.counts for layer, block in blocks.items()}


class Block:
    """x += attention(norm(x)); x += experts(norm(x))."""

    def __init__(self, spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops) -> None:
        self.ops, self.eps, self.rope = ops, spec.eps, spec.rope_of(layer)
        self.attn_norm = weights(f"blk.{layer}.attn_norm.weight")
        self.attention = Attention(spec, share, weights, layer, ops)
        self.ffn_norm = weights(f"blk.{layer}.ffn_norm.weight")
        self.ffn = ExpertFFN(spec, share, weights, layer, ops)

    def __call__(self, x: Array, angles: Array, batch: Batch, cache: LayerCache) -> None:
        ops = self.ops
        with ops.scope():
            h = ops.rms_norm(x, self.attn_norm, self.eps)
            self.attention(h, angles, batch, cache, add_to=x)
        with ops.scope():
            self.ffn(ops.rms_norm(x, self.ffn_norm, self.eps), batch, add_to=x)
