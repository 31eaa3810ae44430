"""Arithmetic of caches and scratch; its use is tested with the Plan."""

from __future__ import annotations

import msgspec
import pytest
from voltapile.topology.memory import PlanError, row_bytes, scratch_bytes
from voltapile.topology.plan import Backend
from voltapile.topology.spec import Rope, Spec

BACKEND = Backend(
    name="cpu", formats=[], kv_types={"f16": (1, 2), "q8_0": (32, 34)}, page_tokens=64,
    max_decode_rows=8, activation_bytes=2.0, reserve_bytes=0, captures=True,
)  # fmt: skip
SPEC = Spec(
    architecture="llama", name="", context=64, layers=2, width=8, vocab=1000, heads=2, kv_heads=1,
    key_dim=4, value_dim=4, ffn=16, eps=0, rope=Rope(layout="norm", dims=4, base=10), tied=True,
    attention_scale=0.5, caches=(),
)  # fmt: skip


def test_row_bytes() -> None:
    assert row_bytes(BACKEND, "-ctk", "f16", 80) == 160
    assert row_bytes(BACKEND, "-ctk", "q8_0", 96) == 102
    with pytest.raises(PlanError, match="-ctk q8_0: heads of 80 values are no multiple"):
        row_bytes(BACKEND, "-ctk", "q8_0", 80)
    with pytest.raises(PlanError, match=r"-ctv q4: .* supported: f16, q8_0"):
        row_bytes(BACKEND, "-ctv", "q4", 80)


def test_scratch_by_hand() -> None:
    ends = 4 * (8 + 4) + 6 * 8 + 4 * 8
    layer = 2 * 6 * 8 + 4 * (8 + 8) + 6 * 8 + 4 * 2 * (4 + 2) + 8 * 16 + 6 * 16
    assert scratch_bytes(SPEC, BACKEND, 10, 3) == 10 * (ends + layer) + 8 * 3 * 1000 + 4096


def test_scratch_grows_with_its_parts() -> None:
    least = scratch_bytes(SPEC, BACKEND, 10, 3)
    assert scratch_bytes(SPEC, BACKEND, 11, 3) > least
    assert scratch_bytes(SPEC, BACKEND, 10, 4) > least
    assert scratch_bytes(SPEC, BACKEND, 1, 12) > scratch_bytes(SPEC, BACKEND, 1, 11)
    wider = msgspec.structs.replace(BACKEND, activation_bytes=4.0)
    assert scratch_bytes(SPEC, wider, 10, 3) > least
    deeper = msgspec.structs.replace(SPEC, layers=99)
    assert scratch_bytes(deeper, BACKEND, 10, 3) == least  # layers take turns
