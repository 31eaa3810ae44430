"""Architecture "qwen4exp": four residual streams, n-gram embeddings, delta nets, sparse attention.

Attributes are named after the GGUF tensors. Knows Ops and Spec; neither backend nor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from voltapile.kernels.families import FamilyOps, MixWeights, NGramHash, NGramWeights
from voltapile.kernels.ops import Array, Batch, Ops
from voltapile.topology.share import Share
from voltapile.topology.spec import NGrams as NGramSpec
from voltapile.topology.spec import Spec, inv_freq
from voltapile.workers.models.blocks import LayerCache, Stateful, Weights
from voltapile.workers.models.experts import ExpertFFN
from voltapile.workers.models.hybrid import DeltaNet, GatedAttention, Hybrid, Mixer


class Qwen4Exp(Hybrid):
    """The residual stream x is [T, S * D] here: S streams side by side."""

    def __init__(self, spec: Spec, share: Share, weights: Weights, ops: Ops) -> None:
        self.family = cast(FamilyOps, ops)
        super().__init__(spec, share, weights, ops)
        self.output_hc = Mix(spec, weights, "output_hc", ops) if share.answers else None

    def block(  # type: ignore[override]
        self, spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops
    ) -> Block:
        return Block(spec, share, weights, layer, ops)

    def grams(self) -> list[NGrams]:
        blocks = cast(dict[int, Block], self.blk)
        return [block.ple for block in blocks.values() if block.ple is not None]

    def stateful(self) -> list[Stateful]:
        return [*super().stateful(), *self.grams()]

    def expect(self, tokens: Sequence[np.ndarray]) -> None:
        for grams in self.grams():
            for run in tokens:
                grams.expect(run)

    @property
    def stream_width(self) -> int:
        return self.spec.streams * self.spec.width

    def _begin(self, batch: Batch) -> Array:
        x = super()._begin(batch)
        return self.family.streams(x, self.spec.streams) if self.share.embeds else x

    def _end(self, x: Array) -> Array:
        assert self.output_hc is not None
        return self.output_hc(x)[0]


# Tokens whose halves of a layer are joined in one launch. Of more, what the first half has made is
# let go before the second begins, as the Plan reckons; the bits are the same.
FEW = 64


class Block:
    """Each half mixes the streams into one input and adds what it computes to all of them."""

    def __init__(self, spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops) -> None:
        blk = f"blk.{layer}"
        self.ops, self.rope = cast(FamilyOps, ops), spec.rope
        self.hc_attn = Mix(spec, weights, f"{blk}.hc_attn", ops)
        self.hc_ffn = Mix(spec, weights, f"{blk}.hc_ffn", ops)
        self.mixer = mixer(spec, share, weights, layer, ops)
        self.ffn = ExpertFFN(spec, share, weights, layer, ops)
        has_ngrams = spec.ngrams is not None and spec.ngrams.layer == layer
        self.ple = NGrams(spec, weights, layer, ops) if has_ngrams else None

    def __call__(self, x: Array, angles: Array, batch: Batch, cache: LayerCache) -> None:
        ops = self.ops
        if self.ple is not None:
            with ops.scope():
                self.ple(x, batch)
        with ops.scope():
            h, inject = self.hc_attn(x)
            before = inject, self.mixer(h, angles, batch, cache)
            if len(batch.slots) <= FEW:
                self._feed(x, before, batch)
                return
            ops.stream_add_(x, *before)
        with ops.scope():
            self._feed(x, None, batch)

    def _feed(self, x: Array, before: tuple[Array, Array] | None, batch: Batch) -> None:
        h, inject = self.hc_ffn(x, before)
        self.ops.stream_add_(x, inject, self.ffn(h, batch))


class Mix:
    """From the streams [T, S * D] to one input [T, D], and how the answer goes to each of them."""

    def __init__(self, spec: Spec, weights: Weights, prefix: str, ops: Ops) -> None:
        self.ops, self.eps, self.width = cast(FamilyOps, ops), spec.eps, spec.width
        self.weights = MixWeights(
            norm=weights(f"{prefix}_norm.weight"),
            down=weights(f"{prefix}_down.weight"),
            up=weights(f"{prefix}_up.weight"),
            inject=weights.optional(f"{prefix}_inject.weight"),
        )

    def __call__(self, x: Array, before: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
        """[T, D] and [T, S]; the last mix of all injects nothing: its matrix is not there. before:
        inject and answer of the half of the layer before, which are added to x first."""
        return self.ops.stream_in(x, before, self.weights, self.width, self.eps)


def mixer(spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops) -> Mixer:
    assert spec.delta is not None
    if layer in spec.delta.layers:
        return DeltaNet(spec, share, weights, layer, ops)
    if spec.cache_of(layer).kind == "qsa":
        return SparseAttention(spec, share, weights, layer, ops)
    return GatedAttention(spec, share, weights, layer, ops)


class SparseAttention(GatedAttention):
    """Sees the blocks of positions that a small indexer chooses. All ranks choose alike."""

    def __init__(self, spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops) -> None:
        assert spec.indexer is not None
        super().__init__(spec, share, weights, layer, ops)
        indexer = f"blk.{layer}.indexer"
        self.indexer, self.frequencies = spec.indexer, inv_freq(spec.rope)
        self.projections = [weights(f"{indexer}.{name}_proj.weight") for name in "qk"]
        self.q_norm, self.k_norm = (weights(f"{indexer}.{name}_norm.weight") for name in "qk")

    def _attend(
        self, q: Array, gate: Array, h: Array, angles: Array, batch: Batch, cache: LayerCache
    ) -> Array:
        ops, indexer, group = self.family, self.indexer, cache.group
        made = ops.linears(h, self.projections, [None, None])
        norms, rest = (self.q_norm, self.k_norm), (self.frequencies, batch, group, self.eps)
        index_q = ops.index_heads(cache.index, made, norms, angles, *rest)
        chosen = ops.choose_blocks(index_q, cache.index, batch, group, indexer.heads, indexer.top_k)
        where = batch, group, self.head_map, self.scale
        return ops.attention_to(chosen, q, cache.kv, *where, gate)


class NGrams:
    """Embeddings of hashed n-grams, added to all streams before one layer."""

    def __init__(self, spec: Spec, weights: Weights, layer: int, ops: Ops) -> None:
        assert spec.ngrams is not None
        self.layer, self.state = layer, cast(Any, None)
        ple, self.ops, self.eps = f"blk.{layer}.ple", cast(FamilyOps, ops), spec.eps
        self.table = weights("per_layer_token_embd.weight")
        self.projections = [weights(f"{ple}_{name}.weight") for name in ("key", "value")]
        norms = {f"norm_{name}": weights(f"{ple}_norm_{name}.weight") for name in NORMS}
        conv1d = weights(f"{ple}_conv1d.weight")
        self.weights = NGramWeights(conv1d=conv1d, dilation=spec.ngrams.size, **norms)
        self.depth = (spec.ngrams.conv_kernel - 1) * spec.ngrams.size
        self.hashing, self.width = hashing(spec.ngrams), spec.streams * spec.width

    def allocate(self, slots: int) -> None:
        self.state = self.ops.ngram_state(slots, self.width, self.depth)

    def expect(self, tokens: np.ndarray) -> None:
        self.ops.ngram_expect(self.table, tokens, self.hashing)

    def __call__(self, x: Array, batch: Batch) -> None:
        ops = self.ops
        found = ops.ngram_gather(self.table, ops.ngram_rows(batch, self.hashing))
        key, value = ops.linears(found, self.projections, [None, None])
        ops.ngram_add_(x, key, value, self.weights, self.state, batch, self.eps)


NORMS = "key", "query", "conv"


def hashing(ngrams: NGramSpec) -> NGramHash:
    return NGramHash(ngrams.multipliers, ngrams.moduli, ngrams.offsets, ngrams.boundary)
