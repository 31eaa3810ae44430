"""What several models share: how a model gets its weights and caches, and common blocks.

Attributes are named after the GGUF tensors. Knows Ops and Spec; neither backend nor ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np
from voltapile.kernels.ops import Array, Batch, Ops, Weight
from voltapile.kernels.positions import PositionOps, Runs
from voltapile.topology.share import Range, Share
from voltapile.topology.spec import Rope, Spec, inv_freq


class Weights(Protocol):
    """Hands out what this rank has of a file's tensors, in the backend's form."""

    def __call__(self, name: str) -> Weight:
        """Raises ValueError where the file has no such tensor."""

    def optional(self, name: str) -> Weight | None:
        """None if the file has no such tensor, or this rank nothing of it."""

    def fused(self, name: str) -> tuple[Weight | None, ...]:
        """What one tensor holds of several, e.g. of q, k and v; nothing where it is not there."""

    def merged(self, name: str) -> Weight:
        """This rank's rows of a tensor, one behind another, where they are not neighbours."""

    def stacked(self, names: Sequence[str]) -> Weight:
        """This rank's rows of several tensors, one tensor behind another."""

    def rows(self, name: str, ranges: Sequence[Range]) -> Weight | None:
        """These rows of a tensor, one behind another; None if the file has no such tensor."""

    def first_column(self, name: str) -> int:
        """Where this rank's columns begin: at a quantisation block, so maybe before its own."""

    def host(self, name: str) -> np.ndarray:
        """float32 values of a small tensor."""


class LayerCache(Protocol):
    """Where a layer keeps its keys and values: an opaque cache and its group of pages. index: of
    a layer that chooses blocks."""

    kv: Any
    group: int
    index: Any


class Model(ABC):
    """What one rank computes of a model. Whether others compute the rest is known to Ops alone."""

    @abstractmethod
    def __init__(self, spec: Spec, share: Share, weights: Weights, ops: Ops) -> None: ...

    @abstractmethod
    def allocate(self, slots: int) -> None:
        """Make what layers remember of each slot beside keys and values; once, after loading."""

    def states(self) -> list[tuple[int, Any]]:
        """What was made, with its layer, in the order of layers."""
        return []

    def expect(self, tokens: Sequence[np.ndarray]) -> None:  # noqa: B027
        """Runs of texts that are about to be computed: what takes time to reach may be asked for.
        Nothing but time depends on it."""

    def counters(self) -> dict[int, Array]:
        """Of each layer with experts int64 [2, experts]: how often each was chosen, for prompts
        and for generated tokens."""
        return {}

    @abstractmethod
    def forward(
        self, batch: Batch, caches: Sequence[LayerCache], taps: Collection[int] = ()
    ) -> tuple[Array | None, dict[int, Array]]:
        """Run the batch through this rank's layers and store its keys and values.

        Returns the normalised hidden states [R, D] of batch.outputs, which `head` turns into
        logits (None where another rank goes on with them), and copies of the residual stream
        [T, D] at those of the layer boundaries in taps (0: the embedding, i: after i layers) that
        are met here.
        """

    @abstractmethod
    def head(self, hidden: Array) -> Array:
        """Logits [R, V]."""


class Stateful(Protocol):
    """A part of a layer that remembers something of each slot."""

    layer: int
    state: Any  # None where this rank has nothing of it

    def allocate(self, slots: int) -> None: ...


class Block(Protocol):
    """One layer."""

    rope: Rope

    def __call__(self, x: Array, angles: Array, batch: Batch, cache: LayerCache) -> None:
        """Add what the layer computes to the residual stream x [T, D]."""


class Decoder(Model):
    """Token embedding, layers one after another, a norm and the output matrix."""

    @abstractmethod
    def block(self, spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops) -> Block: ...

    def __init__(self, spec: Spec, share: Share, weights: Weights, ops: Ops) -> None:
        self.spec, self.share, self.ops = spec, share, ops
        self.token_embd = weights.optional("token_embd.weight")
        self.blk = {i: self.block(spec, share, weights, i, ops) for i in share.layers}
        self.output_norm = weights.optional("output_norm.weight")
        self.output = self._output(weights)
        self.output_bias = weights.optional("output.bias")
        self.ropes = {block.rope: _frequencies(block.rope, weights) for block in self.blk.values()}

    def allocate(self, slots: int) -> None:
        for part in self.stateful():
            part.allocate(slots)

    def states(self) -> list[tuple[int, Any]]:
        found = [(part.layer, part.state) for part in self.stateful() if part.state is not None]
        return sorted(found, key=lambda each: each[0])

    def stateful(self) -> list[Stateful]:
        return []

    def _output(self, weights: Weights) -> Weight | None:
        if not self.spec.tied:
            return weights.optional("output.weight")
        start, stop = self.share.vocab
        if not self.share.answers or start == stop:
            return None
        assert self.token_embd is not None
        if not self.share.is_part:
            return self.token_embd
        return self.ops.weight_rows(self.token_embd, start, stop)

    def forward(
        self, batch: Batch, caches: Sequence[LayerCache], taps: Collection[int] = ()
    ) -> tuple[Array | None, dict[int, Array]]:
        ops, share = self.ops, self.share
        if runs := runs_of(share):
            batch = replace(batch, here=cast(PositionOps, ops).kept(batch, runs))
        x = self._begin(batch)  # [T, D]
        angles = {
            rope: ops.rope_angles(batch.rope_positions, frequencies, scale)
            for rope, (frequencies, scale) in self.ropes.items()
        }
        tapped = {0: ops.copy(x)} if share.embeds and 0 in taps else {}
        for (i, block), cache in zip(self.blk.items(), caches, strict=True):
            block(x, angles[block.rope], batch, cache)
            if i + 1 in taps:
                tapped[i + 1] = ops.copy(x)
        if not share.answers:
            ops.send(x, share.following)
            return None, tapped
        return self._end(ops.gather(x, batch.outputs)), tapped

    @property
    def stream_width(self) -> int:
        """Of what one rank hands on to the next."""
        return self.spec.width

    def _begin(self, batch: Batch) -> Array:
        if not self.share.embeds:
            return self.ops.receive((len(batch.slots), self.stream_width), self.share.previous)
        assert self.token_embd is not None
        return self.ops.embed(self.token_embd, batch.tokens, self.spec.embedding_scale)

    def _end(self, x: Array) -> Array:
        """What the output matrix takes, of the residual stream [R, D]."""
        assert self.output_norm is not None
        return self.ops.rms_norm(x, self.output_norm, self.spec.eps)

    def head(self, hidden: Array) -> Array:
        logits = None
        if self.output is not None:
            logits = self.ops.linear(hidden, self.output, self.output_bias)
        if self.share.is_part:
            logits = self.ops.all_gather(logits, len(hidden), self.share.vocab_parts)
        cap = self.spec.logit_softcap
        return self.ops.softcap_(logits, cap) if cap else logits


def runs_of(share: Share) -> Runs | None:
    """Which positions' keys and values this rank keeps; None: all of its heads'."""
    runs = share.kv_runs
    return Runs(runs.part, runs.parts, runs.run) if runs else None


class PreNormBlock:
    """x += attention(norm(x)); x += FFN(norm(x)), with SwiGLU."""

    def __init__(self, spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops) -> None:
        self.ops, self.eps, self.rope = ops, spec.eps, spec.rope_of(layer)
        self.attn_norm = weights(f"blk.{layer}.attn_norm.weight")
        self.attention = Attention(spec, share, weights, layer, ops)
        self.ffn_norm = weights(f"blk.{layer}.ffn_norm.weight")
        self.ffn = DenseFFN(share, weights, layer, ops)

    def __call__(self, x: Array, angles: Array, batch: Batch, cache: LayerCache) -> None:
        ops = self.ops
        with ops.scope():
            h = ops.rms_norm(x, self.attn_norm, self.eps)
            self.attention(h, angles, batch, cache, add_to=x)
        with ops.scope():
            h = ops.rms_norm(x, self.ffn_norm, self.eps)
            self.ffn(h, "silu", add_to=x)


class Sum:
    """x @ weight.T + bias where ranks may have their own columns of weight, and of x.

    A rank's columns are whole quantisation blocks, so its x may have to stand among zeros. The
    bias is added by the rank that has the first columns. columns: None where they are whole blocks
    in any case, maybe not neighbours, and without a bias.
    """

    def __init__(
        self, share: Share, columns: Range | None, weights: Weights, name: str, ops: Ops
    ) -> None:
        self.ops, self.is_part = ops, share.is_part
        self.weight = weights.optional(f"{name}.weight")
        begin, end = columns or (0, 0)
        self.bias = weights.optional(f"{name}.bias") if begin == 0 < end else None
        self.before = begin - weights.first_column(f"{name}.weight") if columns else 0

    def __call__(
        self, x: Array | None, shape: tuple[int, int], add_to: Array | None = None
    ) -> Array:
        """shape: of the result. x is None where this rank has no columns."""
        ops, part = self.ops, None
        if x is not None:
            assert self.weight is not None
            if x.shape[1] != self.weight.shape[1]:
                x = ops.place(x, self.weight.shape[1], self.before)
            if not self.is_part:
                return ops.linear(x, self.weight, self.bias, add_to)
            part = ops.linear(x, self.weight, self.bias)
        return ops.all_reduce(part, shape, add_to)


class Attention:
    """Grouped-query attention; q and k are normed by head where the file has weights for it."""

    def __init__(self, spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops) -> None:
        blk = f"blk.{layer}"
        self.ops, self.eps, self.head_map = ops, spec.eps, share.head_map
        self.others = OtherPositions(spec, share, ops) if share.kv_runs else None
        if self.head_map:
            self.attn_qkv, self.attn_qkv_bias = qkv(weights, blk)
            self.attn_q_norm = weights.optional(f"{blk}.attn_q_norm.weight")
            self.attn_k_norm = weights.optional(f"{blk}.attn_k_norm.weight")
        columns = share.heads[0] * spec.value_dim, share.heads[1] * spec.value_dim
        self.attn_output = Sum(share, columns, weights, f"{blk}.attn_output", ops)
        self.layout = spec.rope_of(layer).layout
        self.scale, self.window = spec.attention_scale, spec.cache_of(layer).window

    def __call__(
        self,
        h: Array,
        angles: Array,
        batch: Batch,
        cache: LayerCache,
        add_to: Array | None = None,
    ) -> Array:
        o = self._heads(h, angles, batch, cache) if self.head_map else None
        return self.attn_output(o, h.shape, add_to)

    def _heads(self, h: Array, angles: Array, batch: Batch, cache: LayerCache) -> Array:
        ops = self.ops
        q, k, v = ops.linears(h, self.attn_qkv, self.attn_qkv_bias)
        q = ops.rope_store(
            q,
            k,
            v,
            angles,
            self.layout,
            cache.kv,
            stored(batch),
            cache.group,
            self.eps,
            self.attn_q_norm,
            self.attn_k_norm,
        )
        return self._look(q, batch, cache)

    def _look(self, q: Array, batch: Batch, cache: LayerCache) -> Array:
        if self.others is not None:
            return self.others(q, batch, cache, self.head_map, self.scale)
        return self.ops.attention(
            q, cache.kv, batch, cache.group, self.head_map, self.scale, self.window
        )


def stored(batch: Batch) -> Batch:
    """The batch as keys and values are to be stored here."""
    return batch.here.stored if batch.here else batch


class OtherPositions:
    """Attention of this rank's heads where ranks share out keys and values by position: all heads
    look at what is kept here, and what all ranks' parts give together is added up."""

    def __init__(self, spec: Spec, share: Share, ops: Ops) -> None:
        assert share.kv_runs is not None
        self.ops, heads = cast(PositionOps, ops), share.kv_runs.heads
        self.queries = [count * spec.key_dim for count in heads]
        self.weights = [spec.heads] * len(heads)
        begin, end = share.heads
        self.own = (end - begin) * spec.value_dim, begin * spec.value_dim

    def __call__(
        self, q: Array, batch: Batch, cache: LayerCache, head_map: Sequence[int], scale: float
    ) -> Array:
        ops, tokens = self.ops, len(batch.slots)
        q = ops.all_gather(q.reshape(tokens, -1), tokens, self.queries)
        o, weights = ops.attention_part(q, cache.kv, batch.here.seen, cache.group, head_map, scale)
        everyone = ops.all_gather(weights, tokens, self.weights)
        whole = ops.all_reduce(ops.weigh_(o, weights, everyone), o.shape)
        return ops.take(whole, *self.own)


class DenseFFN:
    """down(activation(gate h) * up h)."""

    def __init__(self, share: Share, weights: Weights, layer: int, ops: Ops) -> None:
        blk = f"blk.{layer}"
        self.ops = ops
        self.ffn_gate = weights.optional(f"{blk}.ffn_gate.weight")
        self.ffn_up = weights.optional(f"{blk}.ffn_up.weight")
        self.ffn_gate_bias = weights.optional(f"{blk}.ffn_gate.bias")
        self.ffn_up_bias = weights.optional(f"{blk}.ffn_up.bias")
        self.ffn_down = Sum(share, share.ffn, weights, f"{blk}.ffn_down", ops)

    def __call__(self, h: Array, activation: str, add_to: Array | None = None) -> Array:
        gate, up, inner = self.ffn_gate, self.ffn_up, None
        if gate is not None and up is not None:
            inner = self.ops.glu(h, gate, up, activation, self.ffn_gate_bias, self.ffn_up_bias)
        return self.ffn_down(inner, h.shape, add_to)


def qkv(weights: Weights, blk: str) -> tuple[tuple[Weight, ...], tuple[Weight | None, ...]]:
    """Weights and biases of q, k and v; a fused attn_qkv is cut into its rows."""
    if matrices := weights.fused(f"{blk}.attn_qkv.weight"):
        biases = weights.fused(f"{blk}.attn_qkv.bias") or (None, None, None)
        return tuple(matrix for matrix in matrices if matrix is not None), biases
    names = ("attn_q", "attn_k", "attn_v")
    return (
        tuple(weights(f"{blk}.{name}.weight") for name in names),
        tuple(weights.optional(f"{blk}.{name}.bias") for name in names),
    )


def _frequencies(rope: Rope, weights: Weights) -> tuple[np.ndarray, float]:
    return inv_freq(rope, weights.host(rope.factors_tensor) if rope.factors_tensor else None)
