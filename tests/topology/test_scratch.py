"""States and scratch of experts and delta nets, by hand; dense models are in test_memory.py."""

from __future__ import annotations

import msgspec
import pytest
from reference import CPU, header
from voltapile.topology.architectures import spec_of
from voltapile.topology.scratch import scratch_bytes, state_bytes
from voltapile.topology.share import layer_shares, tensor_shares, whole

HYBRID, MOE = spec_of(header("qwen35-27b-q8")), spec_of(header("qwen3-30b-a3b-q4km"))
FLASH = spec_of(header("flash-next-q4"))


def test_state_of_a_delta_net() -> None:
    """48 heads of 128 x 128 and 3 inputs of 10,240 channels, in 48 layers; 8 tokens of a draft."""
    layer = 48 * 128 * 128 + 3 * 10240 + 8 * (10240 + 2 * 48)
    assert state_bytes(HYBRID, whole(HYBRID)) == 48 * (4 * layer + 64)  # and how many are logged
    published = 48 * (48 * 128 * 128 + 3 * 10240) * 4
    assert published == pytest.approx(156.9e6, rel=1e-3)  # without drafts
    assert state_bytes(MOE, whole(MOE)) == 0


def test_states_are_divided_among_ranks() -> None:
    parts = [state_bytes(HYBRID, share) for share in tensor_shares(HYBRID, [1.0] * 6, 128)]
    alone = state_bytes(HYBRID, whole(HYBRID))
    assert alone < sum(parts) < 1.1 * alone  # a key head that two ranks need is kept by both
    stages = [state_bytes(HYBRID, share) for share in layer_shares(HYBRID, [1.0] * 4)]
    assert stages == [alone // 4] * 4


def test_state_of_flash_next() -> None:
    alone = state_bytes(FLASH, whole(FLASH))
    delta = 36 * (48 * 128 * 128 + 3 * 10240 + 8 * (10240 + 2 * 48))
    ngrams, index = (3 * 3 + 8) * 10240, 12 * (4 + 8) * 128
    assert alone == 4 * (delta + ngrams + index) + 37 * 64


def test_scratch_of_experts_by_hand() -> None:
    """Of one token more: its share of the ends, and the larger of attention and experts."""
    share, own = whole(MOE), 4 + CPU.activation_bytes
    ends = 4 * (2048 + 128) + own * 2048 + 4 * 2048
    one = 8 * 768 + own * 768 + 4 * 2048
    experts = own * 2048 + 8 * 128 + 16 * 8 + 8 * one + 8 * 2048
    more = scratch_bytes(MOE, CPU, share, 513, 4) - scratch_bytes(MOE, CPU, share, 512, 4)
    assert more == pytest.approx(ends + experts, abs=1)


def test_scratch_does_not_grow_with_the_context() -> None:
    longer = msgspec.structs.replace(FLASH, context=1 << 20)
    same = scratch_bytes(FLASH, CPU, whole(FLASH), 512, 4)
    assert scratch_bytes(longer, CPU, whole(FLASH), 512, 4) == same
