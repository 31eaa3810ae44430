"""What architectures share is tested through them, in test_architectures.py; here, its edges."""

from __future__ import annotations

from voltapile.topology.dense import cache, in_layer, with_biases


def test_kinds_of_caches() -> None:
    assert [cache([0], 1, 8, 8, window).kind for window in (0, 4)] == ["full", "window"]


def test_biases_are_optional() -> None:
    assert in_layer(3, with_biases({"ffn_up": (5, 2)})) == {
        "blk.3.ffn_up.weight": ((5, 2), True),
        "blk.3.ffn_up.bias": ((5,), False),
    }
