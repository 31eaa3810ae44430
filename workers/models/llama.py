"""Architecture "llama": pre-norm decoder, grouped-query attention, SwiGLU.

Attributes are named after the GGUF tensors. Knows Ops and Spec; neither backend nor ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from voltapile.kernels.ops import Array, Batch, Ops
from voltapile.topology.spec import Spec, inv_freq
from voltapile.workers.models.blocks import DenseFFN, LayerCache, Model, Weights, qkv


class Llama(Model):
    def __init__(self, spec: Spec, weights: Weights, ops: Ops) -> None:
        self.spec, self.ops = spec, ops
        self.token_embd = weights("token_embd.weight")
        self.blk = [Block(spec, weights, f"blk.{i}", ops) for i in range(spec.layers)]
        self.output_norm = weights("output_norm.weight")
        self.output = self.token_embd if spec.tied else weights("output.weight")
        self.output_bias = weights.optional("output.bias")
        factors = spec.rope.factors_tensor
        self.inv_freq, self.rope_scale = inv_freq(
            spec.rope, weights.host(factors) if factors else None
        )

    def forward(
        self, batch: Batch, caches: Sequence[LayerCache], taps: Collection[int] = ()
    ) -> tuple[Array, dict[int, Array]]:
        ops = self.ops
        x = ops.embed(self.token_embd, batch.tokens)  # [T, D]
        angles = ops.rope_angles(batch.rope_positions, self.inv_freq, self.rope_scale)
        tapped = {0: ops.copy(x)} if 0 in taps else {}
        for i, block in enumerate(self.blk):
            with ops.scope():
                block.attention(x, angles, batch, caches[i])
            with ops.scope():
                block.ffn(x, ops.rms_norm(x, block.ffn_norm, self.spec.eps), "silu")
            if i + 1 in taps:
                tapped[i + 1] = ops.copy(x)
        last = ops.gather(x, batch.outputs)  # [R, D]
        return ops.rms_norm(last, self.output_norm, self.spec.eps), tapped

    def head(self, hidden: Array) -> Array:
        return self.ops.linear(hidden, self.output, self.output_bias)


class Block:
    def __init__(self, spec: Spec, weights: Weights, blk: str, ops: Ops) -> None:
        self.spec, self.ops = spec, ops
        self.attn_norm = weights(f"{blk}.attn_norm.weight")
        (self.attn_q, self.attn_k, self.attn_v), self.attn_qkv_bias = qkv(spec, weights, blk)
        self.attn_output = weights(f"{blk}.attn_output.weight")
        self.attn_output_bias = weights.optional(f"{blk}.attn_output.bias")
        self.ffn_norm = weights(f"{blk}.ffn_norm.weight")
        self.ffn = DenseFFN(weights, blk, ops)
        self.head_map = [h * spec.kv_heads // spec.heads for h in range(spec.heads)]

    def attention(self, x: Array, angles: Array, batch: Batch, cache: LayerCache) -> None:
        """x += attention(norm(x))."""
        ops, spec = self.ops, self.spec
        h = ops.rms_norm(x, self.attn_norm, spec.eps)
        matrices = self.attn_q, self.attn_k, self.attn_v
        q, k, v = ops.linears(h, matrices, self.attn_qkv_bias)
        ops.rope_(q, angles, spec.key_dim, spec.rope.layout)
        ops.rope_(k, angles, spec.key_dim, spec.rope.layout)
        ops.store_kv(cache.kv, k, v, batch, cache.group)
        o = ops.attention(q, cache.kv, batch, cache.group, self.head_map, spec.key_dim**-0.5)
        ops.linear(o, self.attn_output, self.attn_output_bias, add_to=x)
