"""Forecasts: the same as the roofline where it is known, and slower by whatever is farther away."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from reference import CPU, computer, header, plan_for
from voltapile.topology import roofline
from voltapile.topology.architectures import spec_of
from voltapile.topology.forecast import Forecast, busiest, forecast
from voltapile.topology.machine import Machine
from voltapile.topology.plan import Options
from voltapile.topology.planner import plan


def told(where: str, model: str, there: Machine | None = None, **options: Any) -> Forecast:
    gguf = header(model)
    found = plan_for(where, model, **options)
    answer = forecast(spec_of(gguf), gguf.tensors, found, there or computer(where))
    assert answer is not None
    return answer


def test_one_dense_gpu_is_the_roofline() -> None:
    gguf, there = header("qwen3-8b-q4km"), computer("x86-2xh200")
    spec, found = spec_of(gguf), plan_for("x86-2xh200", "qwen3-8b-q4km", split_mode="none")
    card = roofline.card_of(there.gpus[0])
    assert card is not None
    answer = told("x86-2xh200", "qwen3-8b-q4km", split_mode="none")
    work = roofline.decode(spec, found, [1])
    assert answer.decode == pytest.approx(1 / roofline.seconds(work, card), rel=0.02)
    deep = roofline.decode(spec, found, [answer.deep])
    assert answer.decode_deep == pytest.approx(1 / roofline.seconds(deep, card), rel=0.02)
    prompt = roofline.prefill(spec, found, 2048)
    assert answer.prefill == pytest.approx(2048 / roofline.seconds(prompt, card), rel=0.1)
    assert (answer.is_measured, answer.bound_by) == (True, "VRAM")
    assert not told("x86-2xh200", "qwen3-30b-a3b-q4km", split_mode="none").is_measured
    assert not told("x86-2xv100-16gb", "qwen3-8b-q4km", split_mode="none").is_measured


def test_layers_take_turns_and_parts_work_together() -> None:
    speeds = {
        mode: told("x86-4xv100-32gb", "qwen35-27b-q8", split_mode=mode).decode
        for mode in ("none", "layer", "tensor")
    }
    assert speeds["layer"] < 1.1 * speeds["none"] * 4
    assert speeds["tensor"] > 2 * speeds["layer"]


def test_what_is_far_away_is_slow() -> None:
    near = told("x86-2xh200", "qwen3-30b-a3b-q4km", split_mode="none")
    pinned = told(
        "x86-2xh200", "qwen3-30b-a3b-q4km", split_mode="none", overrides=["experts=pinned"]
    )
    assert pinned.decode < near.decode / 3
    assert pinned.bound_by == "host memory"
    host = told(
        "x86-2x2080ti", "qwen3-235b-a22b-q3k", overrides=["experts=host"], host_bytes=200 << 30
    )
    drive = told("x86-2x2080ti", "qwen3-235b-a22b-q3k", overrides=["experts=mapped"])
    assert drive.decode < host.decode
    assert drive.bound_by == "the drive"


def test_links_matter() -> None:
    there = computer("x86-4xv100-32gb")
    slow = [
        msgspec.structs.replace(link, kind="host", peer=False, bandwidth=1e9)
        for link in there.links
    ]
    fast = told("x86-4xv100-32gb", "qwen3-8b-q4km", ranks=4)
    far = told(
        "x86-4xv100-32gb", "qwen3-8b-q4km", msgspec.structs.replace(there, links=slow), ranks=4
    )
    assert far.decode < 0.8 * fast.decode
    assert far.prefill < fast.prefill


def test_sharing_out_positions_costs_meetings_and_spares_reading() -> None:
    """Slower for a short context, which needs none of it, and faster for a long one."""
    heads, positions = (
        told("ac922-6xv100-16gb", "qwen35-27b-q8", split_mode="tensor", kv_split=how)
        for how in ("heads", "positions")
    )
    assert 0.8 * heads.decode < positions.decode < heads.decode
    assert positions.decode / heads.decode < positions.decode_deep / heads.decode_deep
    assert positions.prefill < heads.prefill


def test_a_cpu_is_as_fast_as_its_memory() -> None:
    gguf, laptop = header("qwen3-8b-q4km"), computer("laptop")
    spec = spec_of(gguf)
    found = plan(spec, gguf, laptop, CPU, Options())
    assert forecast(spec, gguf.tensors, found, laptop) is None  # its speed is not known
    node = msgspec.structs.replace(laptop.nodes[0], bandwidth=50e9)
    known = msgspec.structs.replace(laptop, nodes=[node])
    answer = forecast(spec, gguf.tensors, found, known)
    assert answer is not None
    read = sum(each.bytes for name, each in found.tensors.items() if name != "token_embd.weight")
    assert answer.decode == pytest.approx(0.7 * 50e9 / read, rel=0.01)
    assert answer.prefill == 0


def test_an_unknown_card_is_not_guessed() -> None:
    gguf, there = header("qwen3-8b-q4km"), computer("x86-2xv100-16gb")
    gpus = [msgspec.structs.replace(gpu, name="Some card", bandwidth=0.0) for gpu in there.gpus]
    there = msgspec.structs.replace(there, gpus=gpus)
    spec = spec_of(gguf)
    found = plan_for("x86-2xv100-16gb", "qwen3-8b-q4km")
    assert forecast(spec, gguf.tensors, found, there) is None


@pytest.mark.parametrize(("used", "ranks", "ratio"), [(10, 6, 2.07), (8, 1, 1.0), (1, 3, 3.0)])
def test_the_busiest_rank(used: int, ranks: int, ratio: float) -> None:
    """2.07 for ten experts over six: also simulated by others."""
    assert busiest(used, ranks) / (used / ranks) == pytest.approx(ratio, abs=0.01)
