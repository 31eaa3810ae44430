"""What a model is: the record that architectures.py reads from a file, and rope frequencies.

Knows nothing of files, tensors' bytes, devices or ranks.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """How positions turn a head's first `dims` dimensions (../shared models.md section 2)."""

    layout: str  # "norm": pairs (2i, 2i+1); "neox": pairs (i, i + dims/2); "imrope": see sections
    dims: int
    base: float
    scaling: str = "none"  # none | linear | yarn
    factor: float = 1.0
    original_context: int = 0
    attn_factor: float = 1.0
    factors_tensor: str = ""  # llama-3: divide the frequencies by this tensor
    sections: tuple[int, ...] = ()  # imrope: neox's pairs, in turn by time, height and width


class CacheNeed(msgspec.Struct, frozen=True, kw_only=True):
    """One cache group: layers whose pages age together. kind: "full", "window" or "qsa"."""

    kind: str
    layers: tuple[int, ...]
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0  # a token sees so many positions, its own included; 0: all
    index_dim: int = 0  # of the keys by which qsa chooses blocks, beside the others; one head,
    index_block: int = 1  # and one key for so many positions


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A feed-forward net of routed experts, and one that every token takes."""

    count: int
    used: int  # by each token
    ffn: int
    shared_ffn: int = 0  # 0: there is none
    rounds_input: bool = False  # the router was trained on BF16, and sees its input so rounded


class DeltaNet(msgspec.Struct, frozen=True, kw_only=True):
    """Gated delta net: layers with a state for each sequence instead of a cache."""

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    head_dim: int  # of keys and values alike
    conv_kernel: int
    is_tiled: bool  # value head h belongs to key head h % key_heads, not h // (value / key heads)
    gate: str = "silu"  # silu | sigmoid: of the output

    def key_head(self, value_head: int) -> int:
        """The key head that a value head belongs to."""
        if self.is_tiled:
            return value_head % self.key_heads
        return value_head * self.key_heads // self.value_heads


class NGrams(msgspec.Struct, frozen=True, kw_only=True):
    """Embeddings of hashed n-grams, added before one layer."""

    layer: int
    size: int  # N: tokens of the longest n-gram
    heads: int  # table rows for each token
    rows: int
    row_width: int
    conv_kernel: int
    multipliers: tuple[int, ...]  # of the hash: of a token and the size - 1 before it
    moduli: tuple[int, ...]  # of each head
    offsets: tuple[int, ...]  # of each head's rows
    boundary: int  # the token id that stands for everything before a beginning


class Indexer(msgspec.Struct, frozen=True, kw_only=True):
    """Chooses the blocks that a token of a qsa layer attends to."""

    heads: int
    key_dim: int
    top_k: int  # tokens
    block: int  # tokens of a block
    layers: tuple[int, ...] = ()  # for which the file has one, whether they choose or not


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One model. Names: D width, H heads, F ffn, V vocab rows, L layers."""

    architecture: str
    name: str
    context: int  # trained context
    layers: int
    width: int
    vocab: int  # rows of token_embd
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    ffn: int
    eps: float
    rope: Rope
    rope_window: Rope | None = None  # of layers with a window, where it differs
    attention_scale: float  # of scores, before the softmax
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0  # 0: none
    tied: bool
    caches: tuple[CacheNeed, ...]
    has_output_gate: bool = False  # attn_q has a gate of the output behind each head's query
    experts: Experts | None = None  # instead of ffn, which is 0 then
    delta: DeltaNet | None = None
    streams: int = 1  # residual streams (hyper-connections)
    stream_rank: int = 0  # of the matrices that mix them
    ngrams: NGrams | None = None
    indexer: Indexer | None = None
    unused_layers: tuple[int, ...] = ()  # in the file, behind `layers`; they predict next tokens
    unknown_tensors: tuple[str, ...] = ()  # in the file, and no part of such a model here
    warnings: tuple[str, ...] = ()  # what is odd about the file

    def cache_of(self, layer: int) -> CacheNeed:
        return next(need for need in self.caches if layer in need.layers)

    def rope_of(self, layer: int) -> Rope:
        is_window = self.cache_of(layer).window > 0
        return self.rope_window if self.rope_window and is_window else self.rope


class SpecError(ValueError):
    """A model that this version cannot run: what was found and what is supported."""


def inv_freq(rope: Rope, factors: np.ndarray | None = None) -> tuple[np.ndarray, float]:
    """(float32[dims / 2], scale): the angle that one position adds to each pair, and what cosine
    and sine are multiplied by. factors: llama-3's tensor. Computed in float64, rounded once."""
    pairs = np.arange(rope.dims // 2, dtype=np.float64)
    theta = rope.base ** (-2.0 * pairs / rope.dims)
    scale = rope.attn_factor
    if rope.scaling == "linear":
        theta = theta / rope.factor
    elif rope.scaling == "yarn":

        def corner(turns: float) -> float:  # the pair that turns so often in the original context
            ratio = rope.original_context / (2 * math.pi * turns)
            return rope.dims * math.log(ratio) / (2 * math.log(rope.base))

        low = max(0, math.floor(corner(32.0)))
        high = min(rope.dims - 1, math.ceil(corner(1.0)))
        ramp = 1.0 - np.clip((pairs - low) / max(0.001, high - low), 0.0, 1.0)
        theta = theta * ramp + theta / rope.factor * (1.0 - ramp)
        scale *= 1.0 + 0.1 * math.log(max(1.0, rope.factor))
    if factors is not None:
        theta = theta / factors.astype(np.float64)
    return theta.astype(np.float32), scale
