"""What a model is, read once from its metadata; one small function per architecture.

Knows nothing of tensors' bytes, devices or ranks.
"""

from __future__ import annotations

import msgspec


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """How positions turn a head's first `dims` dimensions (../shared models.md section 2)."""

    layout: str  # "norm": pairs (2i, 2i+1); "neox": pairs (i, i + dims/2)
    dims: int
    base: float
    scaling: str = "none"  # none | linear | yarn
    factor: float = 1.0
    original_context: int = 0
    attn_factor: float = 1.0
    factors_tensor: str = ""  # llama-3: divide the frequencies by this tensor


class CacheNeed(msgspec.Struct, frozen=True, kw_only=True):
    """One cache group: layers whose pages age together. kind: "full" or "window"."""

    kind: str
    layers: tuple[int, ...]
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0


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
    tied: bool
    caches: tuple[CacheNeed, ...]
