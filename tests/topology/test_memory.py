"""Arithmetic of caches and scratch; its use is tested with the Plan."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from voltapile.topology.budget import Pool
from voltapile.topology.memory import Load, Sizes, row_bytes, sizes
from voltapile.topology.plan import Backend, CacheGroup, PlanError
from voltapile.topology.scratch import scratch_bytes
from voltapile.topology.share import whole
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


def scratch(spec: Spec, backend: Backend, batch: int, slots: int) -> int:
    return scratch_bytes(spec, backend, whole(spec), batch, slots)


def alone(groups: list[CacheGroup], slots: int, batch: int) -> Sizes:
    return sizes(SPEC, BACKEND, groups, whole(SPEC), 1, Load(slots, batch, 2), 0)


def test_row_bytes() -> None:
    assert row_bytes(BACKEND, "-ctk", "f16", 80) == 160
    assert row_bytes(BACKEND, "-ctk", "q8_0", 96) == 102
    with pytest.raises(PlanError, match="-ctk q8_0: heads of 80 values are no multiple"):
        row_bytes(BACKEND, "-ctk", "q8_0", 80)
    with pytest.raises(PlanError, match=r"-ctv q4: .* supported: f16, q8_0"):
        row_bytes(BACKEND, "-ctv", "q4", 80)


def test_scratch_by_hand() -> None:
    ends = 4 * (8 + 4) + 6 * 8 + 4 * 8
    attention = 6 * 8 + 4 * (2 * 8 + 2 * 4 + 4) + 6 * 8 + 4 * 2 * (4 + 2) + 4 * 8
    ffn = 6 * 8 + 8 * 16 + 6 * 16 + 4 * 8
    assert ffn > attention
    assert scratch(SPEC, BACKEND, 10, 3) == 10 * (ends + ffn) + 8 * 3 * 1000 + 4096
    narrow = msgspec.structs.replace(SPEC, ffn=2, rope_window=SPEC.rope)
    expected = 10 * (ends + 4 * 4 + attention) + 8 * 3 * 1000 + 4096
    assert scratch(narrow, BACKEND, 10, 3) == expected


def test_scratch_grows_with_its_parts() -> None:
    least = scratch(SPEC, BACKEND, 10, 3)
    assert scratch(SPEC, BACKEND, 11, 3) > least
    assert scratch(SPEC, BACKEND, 10, 4) > least
    assert scratch(SPEC, BACKEND, 1, 12) > scratch(SPEC, BACKEND, 1, 11)
    wider = msgspec.structs.replace(BACKEND, activation_bytes=4.0)
    assert scratch(SPEC, wider, 10, 3) > least
    deeper = msgspec.structs.replace(SPEC, layers=99)
    assert scratch(deeper, BACKEND, 10, 3) == least  # layers take turns


def group(window: int, page_bytes: int) -> CacheGroup:
    return CacheGroup(
        kind="window" if window else "full", layers=[0], kv_heads=1, key_dim=4, value_dim=4,
        window=window, key_type="f16", value_type="f16", page_tokens=64, page_bytes=page_bytes,
        pages=0,
    )  # fmt: skip


def test_pages_of_a_window_group_stop_growing() -> None:
    found = alone([group(0, 1000), group(100, 700)], 3, 128)
    most = 3 * (2 * 2 + 3) + 4  # windows of 2 pages, 4 pages of tokens in flight
    assert found.pages(5) == [6, 6]
    assert found.pages(500) == [501, 1 + most]
    assert found.kv(500) == 501 * 1000 + (1 + most) * 700
    one = Pool("here", 0, 0, (found,))
    for columns in (0, 1, most, 500):
        needed = found.growing(columns) + found.fixed
        assert replace(one, available=needed).columns(False) == columns
        assert replace(one, available=needed - 1).columns(False) == max(0, columns - 1)


def test_a_window_pool_holds_what_its_slots_read() -> None:
    """Whatever the windows, starts and lengths: all slots at once fit, and one alone."""
    for window in (1, 24, 63, 64, 65, 512, 1000):
        pool = group(window, 1)
        for slots, batch in ((1, 64), (4, 512), (8, 100)):
            most = alone([pool], slots, batch).most[0]
            live = 0
            for slot in range(slots):
                tokens = 2 * batch - slots + 1 if slot == 0 else 1
                starts = range(1000, 1200)
                live += max((s + tokens - 1) // 64 - pool.first_page(s) + 1 for s in starts)
            assert live <= most


def test_first_page_by_hand() -> None:
    assert [group(0, 1).first_page(start) for start in (0, 1000)] == [0, 0]
    pool = group(100, 1)  # a token at p sees p - 99 to p
    assert [pool.first_page(start) for start in (0, 99, 162, 163, 226, 227)] == [0, 0, 0, 1, 1, 2]
