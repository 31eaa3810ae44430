"""Blocks of the hybrid families: gated delta nets, attention with an output gate, their states.

Attributes are named after the GGUF tensors. Knows Ops and Spec; neither backend nor ranks.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

from voltapile.kernels.families import DeltaShape, DeltaWeights, FamilyOps
from voltapile.kernels.ops import Array, Batch, Ops, Weight
from voltapile.topology.share import Share
from voltapile.topology.spec import DeltaNet as DeltaSpec
from voltapile.topology.spec import Spec
from voltapile.workers.models.blocks import (
    Attention,
    Decoder,
    DenseFFN,
    LayerCache,
    Stateful,
    Sum,
    Weights,
    stored,
)
from voltapile.workers.models.experts import ExpertFFN


class Hybrid(Decoder):
    """Most layers are delta nets with a state for each slot, the others attention."""

    def block(self, spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops) -> Block:
        return Block(spec, share, weights, layer, ops)

    def stateful(self) -> list[Stateful]:
        blocks = cast(dict[int, Block], self.blk)
        return [block.mixer for block in blocks.values() if isinstance(block.mixer, DeltaNet)]

    def counters(self) -> dict[int, Array]:
        nets = {layer: cast(Block, block).ffn for layer, block in self.blk.items()}
        return {layer: net.counts for layer, net in nets.items() if isinstance(net, ExpertFFN)}


class Mixer(Protocol):
    """What mixes tokens: a delta net or attention."""

    def __call__(
        self, h: Array, angles: Array, batch: Batch, cache: LayerCache, add_to: Array | None = None
    ) -> Array: ...


class Block:
    """x += mixer(norm(x)); x += FFN(norm(x))."""

    def __init__(self, spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops) -> None:
        blk = f"blk.{layer}"
        self.ops, self.eps, self.rope = ops, spec.eps, spec.rope
        self.attn_norm = weights(f"{blk}.attn_norm.weight")
        self.mixer = mixer(spec, share, weights, layer, ops)
        self.post_attention_norm = weights(f"{blk}.post_attention_norm.weight")
        self.ffn = feed_forward(spec, share, weights, layer, ops)

    def __call__(self, x: Array, angles: Array, batch: Batch, cache: LayerCache) -> None:
        ops = self.ops
        with ops.scope():
            h = ops.rms_norm(x, self.attn_norm, self.eps)
            self.mixer(h, angles, batch, cache, add_to=x)
        with ops.scope():
            h = ops.rms_norm(x, self.post_attention_norm, self.eps)
            if isinstance(self.ffn, ExpertFFN):
                self.ffn(h, batch, add_to=x)
            else:
                self.ffn(h, "silu", add_to=x)


def mixer(spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops) -> Mixer:
    if spec.delta is not None and layer in spec.delta.layers:
        return DeltaNet(spec, share, weights, layer, ops)
    return GatedAttention(spec, share, weights, layer, ops)


def feed_forward(
    spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops
) -> ExpertFFN | DenseFFN:
    if spec.experts is not None:
        return ExpertFFN(spec, share, weights, layer, ops)
    return DenseFFN(share, weights, layer, ops)


class GatedAttention(Attention):
    """attn_q has a gate of the output behind each head's query."""

    def __init__(self, spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops) -> None:
        super().__init__(spec, share, weights, layer, ops)
        self.family, self.key_dim = cast(FamilyOps, ops), spec.key_dim
        # The three positions of a text token are equal, which makes imrope neox.
        self.layout = "neox"

    def _heads(self, h: Array, angles: Array, batch: Batch, cache: LayerCache) -> Array:
        ops = self.family
        both, k, v = ops.linears(h, self.attn_qkv, self.attn_qkv_bias)
        q, gate = ops.split_heads(both, self.key_dim)
        norms = self.attn_q_norm, self.attn_k_norm
        q = ops.rope_store(
            q, k, v, angles, self.layout, cache.kv, stored(batch), cache.group, self.eps, *norms
        )
        return self._attend(q, gate, h, angles, batch, cache)

    def _attend(
        self, q: Array, gate: Array, h: Array, angles: Array, batch: Batch, cache: LayerCache
    ) -> Array:
        return self.family.gate_(self._look(q, batch, cache), gate)


class DeltaNet:
    """Linear attention that forgets, with a state instead of a cache."""

    def __init__(self, spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops) -> None:
        assert spec.delta is not None
        blk = f"blk.{layer}"
        self.layer, self.state = layer, cast(Any, None)
        self.ops = cast(FamilyOps, ops)
        self.shape = delta_shape(spec.delta, share, spec.eps)
        self.ssm_out = Sum(share, None, weights, f"{blk}.ssm_out", ops)
        if not self.shape.value_heads:
            return
        gates = _gates(spec.delta, share, weights, blk)
        self.projections = [*_inputs(spec.delta, share, weights, blk), gates]
        self.weights = DeltaWeights(
            conv1d=weights.merged(f"{blk}.ssm_conv1d.weight"),
            a=weights.merged(f"{blk}.ssm_a"),
            dt=weights.merged(f"{blk}.ssm_dt.bias"),
            norm=weights(f"{blk}.ssm_norm.weight"),
        )

    def allocate(self, slots: int) -> None:
        if self.shape.value_heads:
            self.state = self.ops.delta_state(slots, self.shape)

    def __call__(
        self, h: Array, angles: Array, batch: Batch, cache: LayerCache, add_to: Array | None = None
    ) -> Array:
        o = self._heads(h, batch) if self.shape.value_heads else None
        return self.ssm_out(o, h.shape, add_to)

    def _heads(self, h: Array, batch: Batch) -> Array:
        ops = self.ops
        m, z, gates = ops.linears(h, self.projections, [None] * 3)
        return ops.delta_net((m, z, gates), self.weights, self.shape, self.state, batch)


def delta_shape(delta: DeltaSpec, share: Share, eps: float) -> DeltaShape:
    """As much of it as this rank has."""
    return DeltaShape(
        key_heads=len(share.key_heads),
        value_heads=len(share.value_heads),
        dim=delta.head_dim,
        kernel=delta.conv_kernel,
        key_head_of=tuple(share.key_heads.index(delta.key_head(h)) for h in share.value_heads),
        gate=delta.gate,
        eps=eps,
    )


def _inputs(delta: DeltaSpec, share: Share, weights: Weights, blk: str) -> list[Weight]:
    """The projections to q, k, v and to the gate; older files have them by key head in one."""
    dim, values = delta.head_dim, delta.value_heads // delta.key_heads * delta.head_dim
    sizes, starts = (dim, dim, values, values), (0, dim, 2 * dim, 2 * dim + values)
    q, k, v, z = (
        [(head * sum(sizes) + start, head * sum(sizes) + start + size) for head in share.key_heads]
        for start, size in zip(starts, sizes, strict=True)
    )
    both = [weights.rows(f"{blk}.ssm_in.weight", rows) for rows in (q + k + v, z)]
    found = [weight for weight in both if weight is not None]
    return found or [weights.merged(f"{blk}.{name}.weight") for name in ("attn_qkv", "attn_gate")]


def _gates(delta: DeltaSpec, share: Share, weights: Weights, blk: str) -> Weight:
    """The projection to b of all value heads, then a; older files have them by key head in one."""
    if delta.is_tiled:
        return weights.stacked((f"{blk}.ssm_beta.weight", f"{blk}.ssm_alpha.weight"))
    each = delta.value_heads // delta.key_heads
    b, a = (
        [((2 * head + i) * each, (2 * head + i + 1) * each) for head in share.key_heads]
        for i in range(2)
    )
    found = weights.rows(f"{blk}.ssm_ba.weight", b + a)
    if found is None:
        raise ValueError(f"tensor '{blk}.ssm_ba.weight' is missing")
    return found
