"""Architecture "gemma3": four norms a layer, GeGLU; most layers see a window, with their own rope.

Attributes are named after the GGUF tensors. Knows Ops and Spec; neither backend nor ranks.
"""

from __future__ import annotations

from voltapile.kernels.ops import Array, Batch, Ops
from voltapile.topology.share import Share
from voltapile.topology.spec import Spec
from voltapile.workers.models.blocks import Attention, Decoder, DenseFFN, LayerCache, Weights


class Gemma3(Decoder):
    def block(self, spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops) -> Block:
        return Block(spec, share, weights, layer, ops)


class Block:
    """x += norm(attention(norm(x))); x += norm(FFN(norm(x)))."""

    def __init__(self, spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops) -> None:
        blk = f"blk.{layer}"
        self.ops, self.eps, self.rope = ops, spec.eps, spec.rope_of(layer)
        self.attn_norm = weights(f"{blk}.attn_norm.weight")
        self.attention = Attention(spec, share, weights, layer, ops)
        self.post_attention_norm = weights(f"{blk}.post_attention_norm.weight")
        self.ffn_norm = weights(f"{blk}.ffn_norm.weight")
        self.ffn = DenseFFN(share, weights, layer, ops)
        self.post_ffw_norm = weights(f"{blk}.post_ffw_norm.weight")

    def __call__(self, x: Array, angles: Array, batch: Batch, cache: LayerCache) -> None:
        ops = self.ops
        with ops.scope():
            o = self.attention(ops.rms_norm(x, self.attn_norm, self.eps), angles, batch, cache)
            ops.rms_norm(o, self.post_attention_norm, self.eps, add_to=x)
        with ops.scope():
            f = self.ffn(ops.rms_norm(x, self.ffn_norm, self.eps), "gelu_tanh")
            ops.rms_norm(f, self.post_ffw_norm, self.eps, add_to=x)
