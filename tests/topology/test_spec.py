"""Rope frequencies, and which layer has which kind of cache and rope."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from voltapile.topology.spec import CacheNeed, Rope, Spec, inv_freq


def rope(**changes: Any) -> Rope:
    fields: dict[str, Any] = {"layout": "norm", "dims": 8, "base": 1e4, "original_context": 64}
    return Rope(**fields | changes)


def test_rope_without_scaling() -> None:
    theta, scale = inv_freq(rope())
    assert theta.dtype == np.float32
    assert theta.tolist() == [np.float32(10 ** -(0.0 + i)) for i in range(4)]
    assert scale == 1.0


def test_rope_linear_and_factors() -> None:
    theta, scale = inv_freq(rope(scaling="linear", factor=4.0))
    assert theta == pytest.approx([0.25, 0.025, 0.0025, 0.00025])
    assert scale == 1.0
    theta, _ = inv_freq(rope(), np.array([1, 2, 4, 8], np.float32))
    assert theta == pytest.approx([1, 0.05, 0.0025, 0.000125])


def test_rope_yarn_by_hand() -> None:
    """dims 8, base 10000, 64 positions: corner(b) = 8 ln(64 / 2 pi b) / (2 ln 10000)."""
    assert 8 * math.log(64 / (2 * math.pi * 32)) / (2 * math.log(1e4)) < 0  # low = 0
    assert math.ceil(8 * math.log(64 / (2 * math.pi)) / (2 * math.log(1e4))) == 2  # high = 2
    theta, scale = inv_freq(rope(scaling="yarn", factor=4.0, attn_factor=0.5))
    # ramps 1, 1/2, 0, 0
    assert theta == pytest.approx([1.0, 0.1 * (0.5 + 0.5 / 4), 0.01 / 4, 0.001 / 4])
    assert scale == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))


def test_kinds_of_layers() -> None:
    def need(kind: str, layers: tuple[int, ...], window: int) -> CacheNeed:
        return CacheNeed(
            kind=kind, layers=layers, kv_heads=1, key_dim=4, value_dim=4, window=window
        )

    far, near = rope(base=1e6), rope(base=1e4)
    caches = need("full", (2,), 0), need("window", (0, 1, 3), 8)
    spec = Spec(
        architecture="gemma3", name="", context=64, layers=4, width=8, vocab=9, heads=2,
        kv_heads=1, key_dim=4, value_dim=4, ffn=8, eps=0, rope=far, rope_window=near,
        attention_scale=0.5, tied=True, caches=caches,
    )  # fmt: skip
    assert [spec.cache_of(layer).window for layer in range(4)] == [8, 8, 0, 8]
    assert [spec.rope_of(layer) for layer in range(4)] == [near, near, far, near]
