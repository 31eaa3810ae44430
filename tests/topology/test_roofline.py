"""Bytes, arithmetic and launches of steps by hand, and the cards that they are set against."""

from __future__ import annotations

import msgspec
import pytest
from voltapile.kernels.cuda import clusters, matmul, wide
from voltapile.kernels.cuda.chunks import CHUNKS
from voltapile.topology import roofline
from voltapile.topology.gpu import Gpu
from voltapile.topology.plan import CacheGroup, Placement, Plan
from voltapile.topology.roofline import Card, Work
from voltapile.topology.spec import Experts, Rope, Spec

SPEC = Spec(
    architecture="llama", name="", context=4096, layers=3, width=32, vocab=100, heads=4, kv_heads=2,
    key_dim=8, value_dim=8, ffn=64, eps=0, rope=Rope(layout="norm", dims=4, base=10), tied=False,
    attention_scale=0.5, caches=(),
)  # fmt: skip
TOKEN = 2 * 2 * 8 * 2 * 2  # bytes of a position: 2 layers, 2 heads of 8, keys and values, halves


def placed(type_name: str, values: int, block_len: int, block_bytes: int) -> Placement:
    nbytes = values // block_len * block_bytes
    return Placement(tier="vram", ranks=[0], bytes=nbytes, type=type_name)


def group(layers: list[int], window: int) -> CacheGroup:
    return CacheGroup(
        kind="window" if window else "full", layers=layers, kv_heads=2, key_dim=8, value_dim=8,
        window=window, key_type="f16", value_type="f16", page_tokens=64,
        page_bytes=64 * len(layers) * 2 * 2 * 8 * 2, pages=9,
    )  # fmt: skip


TENSORS = {
    "token_embd.weight": placed("Q8_0", 3200, 32, 34),
    "blk.0.ffn_up.weight": placed("Q4_0", 6400, 32, 18),
    "output.weight": placed("F16", 3200, 1, 2),
}
PLAN = Plan(
    model=["x"], alias="x", architecture="llama", backend="cuda", endpoint="", context=4096,
    slots=4, batch_tokens=200, buckets=[1], steps_in_flight=2, answer_rank=0, ranks=[],
    caches=[group([0, 1], 0), group([2], 100)], tensors=TENSORS,
)  # fmt: skip
READ = 6400 // 32 * 18 + 6400
CARD = Card("any", 1e9, 1e12, 1e12 / roofline.FLOP_AN_ISSUE)


def test_a_decode_step_by_hand() -> None:
    work = roofline.decode(SPEC, PLAN, [1000, 50])
    seen = 2 * (1000 + 50) + 1 * (100 + 50)  # positions times layers; one layer has a window
    assert work.tokens == 2
    assert work.weights == READ
    assert work.cache == seen * TOKEN // 2
    assert work.few == 2 * 2 * (6400 + 3200)
    assert work.attention == 2 * seen * 4 * (8 + 8)
    assert work.many == 0
    assert work.launches == 3 * roofline.LAYER_LAUNCHES + roofline.STEP_LAUNCHES


def test_experts_are_read_as_they_are_chosen() -> None:
    spec = msgspec.structs.replace(SPEC, experts=Experts(count=12, used=3, ffn=64))
    tensors = {**TENSORS, "blk.0.ffn_up_exps.weight": placed("Q4_0", 64000, 32, 18)}
    plan = msgspec.structs.replace(PLAN, tensors=tensors)
    one, two = (roofline.decode(spec, plan, [9] * rows) for rows in (1, 2))
    assert one.weights == pytest.approx(READ + 0.25 * 36000)
    assert two.weights == pytest.approx(READ + (1 - 0.75**2) * 36000)
    assert two.few == pytest.approx(2 * 2 * (6400 + 3200 + 0.25 * 64000))


def test_many_rows_read_the_weights_again() -> None:
    for name, arch, expected in (("V100", 70, [1, 1, 2, 2, 4]), ("H200", 90, [1, 1, 1, 1, 2])):
        card = roofline.card_of(gpu(name, arch))
        assert card is not None
        works = [
            roofline.decode(SPEC, PLAN, [10] * rows, card.at_once) for rows in (1, 16, 17, 32, 64)
        ]
        assert [work.weights / READ for work in works] == expected


def test_rows_are_read_for_as_many_as_kernels_take() -> None:
    assert (clusters.ARCH, clusters.ROOM) == (roofline.CLUSTER_ARCH, roofline.CLUSTER_ROWS)
    assert wide.ROOM == roofline.ROWS_AT_ONCE
    assert matmul.room_for(64, [CHUNKS["Q4_K"]], 70) == roofline.ROWS_AT_ONCE


def test_a_tied_embedding_is_read_as_the_output_matrix() -> None:
    tied = msgspec.structs.replace(SPEC, tied=True)
    work = roofline.decode(tied, PLAN, [1])
    assert work.weights == READ + 3400
    assert work.few == 2 * (6400 + 3200 + 3200)


def test_a_prompt_by_hand() -> None:
    whole = roofline.prefill(SPEC, PLAN, 350)  # chunks of 200 and 150
    chunks = [roofline.prefill(SPEC, PLAN, 200), roofline.prefill(SPEC, PLAN, 150, start=200)]
    assert whole == chunks[0] + chunks[1]
    assert whole.tokens == 350
    assert whole.many == 2 * 350 * 6400
    assert whole.few == 2 * 2 * 3200  # the last token of each step
    assert whole.weights == 2 * (READ + 4 * 6400)
    full = sum(range(1, 351))
    window = sum(min(p, 100) for p in range(1, 351))
    assert whole.attention == 2 * (2 * full + window) * 4 * (8 + 8)
    assert whole.cache == (2 * (200 + 350) + 100 + 100) * TOKEN // 2


def test_a_short_prompt_takes_the_engine_of_few_rows() -> None:
    work = roofline.prefill(SPEC, PLAN, roofline.MANY_ROWS - 1)
    assert work.many == 0
    assert work.few == 2 * (roofline.MANY_ROWS - 1) * 9600
    assert work.weights == 2 * roofline.prefill(SPEC, PLAN, 63, at_once=32).weights


def test_seconds_add_up_and_none_is_below_the_limit() -> None:
    shares = dict.fromkeys(roofline.OURS, 0.5) | {"launch": 100.0}
    work = Work(tokens=6, weights=1e9, cache=5e8, few=5e11, attention=2e12, launches=7)
    assert roofline.seconds(work, CARD, shares) == pytest.approx(2 * (1 + 0.5 + 2) + 0.07)
    many = Work(tokens=12, weights=1e9, few=3e12, many=4e12)
    assert roofline.seconds(many, CARD, shares) == pytest.approx(2 * (3 * 16 / 12 + 4))
    assert roofline.limit(work, CARD) == 2.5
    assert roofline.limit(Work(weights=4e9, few=1e12), CARD) == 4.0
    assert roofline.limit(Work(weights=4e9, many=1e12), CARD) == 1.0
    for step in (roofline.decode(SPEC, PLAN, [9]), roofline.prefill(SPEC, PLAN, 350)):
        assert roofline.seconds(step, CARD) > roofline.limit(step, CARD)


def gpu(name: str, arch: int, bandwidth: float = 0.0) -> Gpu:
    return Gpu(index=0, name=name, arch=arch, memory_bytes=1, free_bytes=1, bandwidth=bandwidth)


def test_cards_are_known_by_name() -> None:
    h200 = roofline.card_of(gpu("NVIDIA H200", 90))
    assert h200 is not None
    assert (h200.bandwidth, h200.flops, h200.is_measured) == (3.95e12, 790e12, True)
    volta = roofline.card_of(gpu("Tesla V100-SXM2-16GB", 70))
    assert volta is not None
    assert (volta.bandwidth, volta.flops, volta.is_measured) == (800e9, 98e12, False)
    names = {"NVIDIA H100 PCIe": 2.0, "NVIDIA H100 80GB HBM3": 3.35}
    for name, terabytes in names.items():
        card = roofline.card_of(gpu(name, 90))
        assert card is not None
        assert card.bandwidth == terabytes * 1e12 * roofline.REACHED_BYTES


def test_other_cards_are_known_by_their_memory() -> None:
    card = roofline.card_of(gpu("NVIDIA B999", 103, 8e12))
    assert card is not None
    assert card.bandwidth == 8e12 * roofline.REACHED_BYTES
    assert card.flops == 8e12 * roofline.FLOPS_A_BYTE[100] * roofline.REACHED_FLOPS
    assert roofline.card_of(gpu("NVIDIA B999", 103)) is None
    assert roofline.card_of(gpu("GeForce GTX 1080", 61, 320e9)) is None
