"""Plans of the reference machines: golden, quick, and never more than a memory holds."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from reference import CPU, CUDA, MACHINES, MODELS, computer, golden, header, plan_for, usual
from voltapile.kernels.backend import describe
from voltapile.shm.gguf import Gguf
from voltapile.topology.architectures import spec_of
from voltapile.topology.plan import (
    OptionError,
    Options,
    Plan,
    PlanError,
    from_json,
    to_json,
    unbuilt,
)
from voltapile.topology.planner import largest_context, plan

DATA = Path(__file__).parents[1] / "data"
MINI = DATA / "golden-mini"


@pytest.mark.parametrize("where", MACHINES)
def test_golden(where: str) -> None:
    """If a change is meant: python tests/topology/reference.py, and look at the difference."""
    path = DATA / "plans" / f"{where}.json"
    wanted = json.loads(path.read_text())
    found = json.loads(json.dumps({model: golden(where, model) for model in MODELS}))
    assert found == wanted


@pytest.mark.parametrize("where", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_no_memory_is_promised_twice(where: str, model: str) -> None:
    there = computer(where)
    try:
        found = usual(where, model)
    except PlanError:
        assert where == "laptop"
        return
    margin = 256 << 20
    free = {f"cuda:{gpu.index}": gpu.free_bytes for gpu in there.gpus} | {"cpu": 1 << 60}
    for rank in found.ranks:
        assert sum(rank.memory.values()) + margin <= free[rank.device]
    host = sum(sum(rank.host.values()) for rank in found.ranks) + sum(found.shared.values())
    host += sum(sum(rank.memory.values()) for rank in found.ranks if rank.device == "cpu")
    assert host + margin <= there.available_bytes
    assert from_json(to_json(found)) == found
    counted = sum(each.bytes for each in found.tensors.values())
    assert counted == sum(tensor.nbytes for tensor in header(model).tensors.values())
    assert {each.split for each in found.tensors.values()} <= {"none", "rows", "columns", "experts"}


def test_24576_experts_on_6_gpus_are_planned_quickly() -> None:
    begin = time.process_time()
    plan_for("ac922-6xv100-16gb", "flash-next-q4", context=262144)
    assert time.process_time() - begin < 2


def test_a_loadable_plan_is_all_in_vram() -> None:
    assert unbuilt(usual("x86-2xh200", "qwen3-8b-q4km")) == ""
    assert unbuilt(usual("laptop", "qwen3-8b-q4km")) == ""
    found = unbuilt(usual("x86-2x2080ti", "qwen3-30b-a3b-q4km"))
    assert "keeps weights outside VRAM" in found
    assert "GiB host" in found
    assert "can be planned and not computed yet" in found


def test_gpus_are_chosen_by_forecast() -> None:
    """Summing over islands costs more than it saves where a model is small."""
    small = usual("ac922-6xv100-16gb", "qwen3-30b-a3b-q4km")
    large = usual("ac922-6xv100-16gb", "qwen35-27b-q8")
    assert (len(small.ranks), len(large.ranks)) == (3, 6)
    assert small.notes[0].startswith("3 of 6 GPUs: ")


@pytest.mark.parametrize(
    ("options", "mode", "devices"),
    [
        ({"split_mode": "none"}, "single", ["cuda:0"]),
        ({"split_mode": "layer"}, "layer", [f"cuda:{i}" for i in range(6)]),
        ({"ranks": 1}, "single", ["cuda:0"]),
        ({"ranks": 3}, "tensor", ["cuda:0", "cuda:1", "cuda:2"]),
        ({"ranks": 4}, "tensor", ["cuda:0", "cuda:1", "cuda:3", "cuda:4"]),  # two of each island
        ({"devices": [4, 5]}, "tensor", ["cuda:4", "cuda:5"]),
        ({"tensor_split": [1.0, 1.0, 0, 0, 0, 1.0]}, "tensor", ["cuda:0", "cuda:1", "cuda:5"]),
    ],
)  # fmt: skip
def test_options_decide_first(options: dict[str, Any], mode: str, devices: list[str]) -> None:
    found = plan_for("ac922-6xv100-16gb", "qwen3-8b-q4km", **options)
    assert (found.mode, [rank.device for rank in found.ranks]) == (mode, devices)


def test_processes_live_near_their_gpus() -> None:
    found = usual("ac922-6xv100-16gb", "qwen35-27b-q8")
    assert [rank.node for rank in found.ranks] == [0, 0, 0, 8, 8, 8]
    used = [cpu for rank in found.ranks for cpu in rank.cpus]
    assert len(set(used)) == len(used)


def test_unequal_gpus_get_unequal_parts() -> None:
    """A GPU with half as much free memory gets half as much."""
    there = computer("x86-2xv100-16gb")
    small = msgspec.structs.replace(there.gpus[1], free_bytes=there.gpus[0].free_bytes // 2)
    there = msgspec.structs.replace(there, gpus=[there.gpus[0], small])
    gguf = header("qwen3-8b-q4km")
    found = plan(spec_of(gguf), gguf, there, CUDA, Options(split_mode="tensor"))
    assert [rank.share.heads for rank in found.ranks] == [(0, 21), (21, 32)]
    same = plan(spec_of(gguf), gguf, there, CUDA, Options(tensor_split=[1.0, 1.0]))
    assert [rank.share.heads for rank in same.ranks] == [(0, 16), (16, 32)]


def test_a_gpu_that_others_use_is_told_of() -> None:
    there = computer("x86-2xv100-16gb")
    busy = msgspec.structs.replace(there.gpus[1], free_bytes=12 << 30)
    there = msgspec.structs.replace(there, gpus=[there.gpus[0], busy])
    gguf = header("qwen3-8b-q4km")
    found = plan(spec_of(gguf), gguf, there, CUDA, Options(split_mode="tensor", context=4096))
    assert found.warnings == [
        "GPU 1: 3.78 GiB of 15.78 GiB are taken by something else; end it, or leave this GPU out "
        "with --device"
    ]


def test_gpus_that_are_too_old_are_left_out() -> None:
    there = computer("x86-2xv100-16gb")
    old = msgspec.structs.replace(there.gpus[0], name="GeForce GT 1030", arch=61)
    mixed = msgspec.structs.replace(there, gpus=[old, there.gpus[1]])
    gguf = header("qwen3-8b-q4km")
    found = plan(spec_of(gguf), gguf, mixed, CUDA, Options())
    assert [rank.device for rank in found.ranks] == ["cuda:1"]
    for gpus, options in ((mixed.gpus, Options(devices=[0])), ([old], Options())):
        only = msgspec.structs.replace(there, gpus=gpus)
        with pytest.raises(
            PlanError, match=r"GPU 0 \(GeForce GT 1030\) has compute capability 6.1"
        ):
            plan(spec_of(gguf), gguf, only, CUDA, options)


def test_a_node_that_is_too_small_for_its_ranks_is_told_of() -> None:
    """Three cards of one island, and 98 GB of experts: node 0 has 44."""
    model = "qwen3-235b-a22b-q3k"
    found = plan_for("ac922-6xv100-16gb", model, devices=[0, 1, 2], context=4096)
    (warning,) = found.warnings
    assert warning.startswith("node 0 has 44.00 GiB free for ")
    assert plan_for("ac922-6xv100-16gb", model, context=4096).warnings == []


def test_memory_that_the_user_knows_better() -> None:
    plain = plan_for("x86-2xv100-16gb", "qwen3-8b-q4km", devices=[0])
    larger = plan_for("x86-2xv100-16gb", "qwen3-8b-q4km", devices=[0], vram_bytes=[32 << 30])
    assert larger.context > plain.context
    with pytest.raises(PlanError, match="--vram: 3 sizes for 2 GPUs; give one, or one for each"):
        plan_for("x86-2xv100-16gb", "qwen3-8b-q4km", vram_bytes=[1, 2, 3])
    tables = [
        plan_for("x86-2xv100-16gb", "flash-next-q4", host_bytes=size << 30).shared
        for size in (120, 24)
    ]
    assert "per_layer_token_embd.weight" in tables[0]
    assert "per_layer_token_embd.weight" not in tables[1]  # stays in the mapped file


def test_a_shortage_names_what_would_help() -> None:
    with pytest.raises(PlanError) as caught:
        plan_for("x86-2xv100-16gb", "qwen3-8b-q4km", context=400_000, fit=False, split_mode="none")
    told = str(caught.value)
    assert told.startswith("not enough memory on GPU 0 (Tesla V100-PCIE-16GB): ")
    assert "use -c 6" in told
    assert "\n" not in told
    with pytest.raises(PlanError, match="or -ctk q8_0 -ctv q8_0"):
        plan_for("x86-2xv100-16gb", "qwen3-8b-q4km", context=99_000, split_mode="none", fit=False)
    with pytest.raises(PlanError, match="use a smaller model or quantisation"):
        plan_for("x86-2xv100-16gb", "qwen35-27b-q8", context=8192, fit=False)


def test_what_lies_outside_vram_does_not_count_there() -> None:
    """The n-gram table does not make six cards too small; experts do."""
    with pytest.raises(PlanError, match="not enough memory on GPU"):
        plan_for("ac922-6xv100-16gb", "flash-next-q4", fit=False)
    with pytest.raises(PlanError, match=r"tensors take 103.46 GiB, but 6 GPUs have 94"):
        plan_for("ac922-6xv100-16gb", "qwen3-235b-a22b-q3k", fit=False, ranks=6)
    found = plan_for("ac922-6xv100-16gb", "flash-next-q4", fit=False, cpu_moe=8)
    assert found.tensors["blk.8.ffn_up_exps.weight"].tier == "vram"


def test_largest_context_is_the_largest() -> None:
    gguf, there = header("qwen3-8b-q4km"), computer("x86-2x2080ti")
    spec, options = spec_of(gguf), Options(split_mode="none", fit=False)
    largest = largest_context(spec, gguf, there, CUDA, options)
    plan(spec, gguf, there, CUDA, msgspec.structs.replace(options, context=largest))
    with pytest.raises(PlanError, match=f"use -c {largest}"):
        plan(spec, gguf, there, CUDA, msgspec.structs.replace(options, context=largest + 64))


def test_positions_that_are_shared_out_leave_room_for_more() -> None:
    """Four KV heads on six cards: two cards keep two of them, or each a sixth of all positions."""
    gguf, there = header("qwen35-27b-q8"), computer("ac922-6xv100-16gb")
    spec, backend = spec_of(gguf), CUDA
    options = Options(split_mode="tensor", fit=False, vram_bytes=[10 << 30], slots=2)
    split = msgspec.structs.replace(options, kv_split="positions")
    heads, positions = (largest_context(spec, gguf, there, backend, o) for o in (options, split))
    assert positions > 2.5 * heads
    wanted = msgspec.structs.replace(options, context=2 * heads)
    with pytest.raises(PlanError, match="or --kv-split positions"):
        plan(spec, gguf, there, backend, wanted)
    other = msgspec.structs.replace(backend, splits_positions=False)
    with pytest.raises(PlanError, match="the cuda backend cannot do that yet"):
        plan(spec, gguf, there, other, msgspec.structs.replace(wanted, kv_split="positions"))


def test_blocks_that_predict_next_tokens_take_nothing() -> None:
    with Gguf.open(MINI / "qwen35-mtp" / "model-f16.gguf") as gguf:
        found = plan(spec_of(gguf), gguf, computer("laptop"), CPU, Options())
        unused = [name for name, each in found.tensors.items() if not each.ranks]
        assert unused
        assert all(name.startswith("blk.3.") for name in unused)
        used = sum(each.bytes for each in found.tensors.values() if each.ranks)
        assert found.ranks[0].mapped_bytes == used
    assert found.warnings == []


@pytest.mark.parametrize("name", ["qwen3moe", "qwen35", "qwen35moe", "qwen3next", "qwen4exp"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_small_models_are_planned_on_any_number_of_ranks(name: str, ranks: int) -> None:
    with Gguf.open(MINI / name / "model-f16.gguf") as gguf:
        for mode in ("tensor", "experts") if "moe" in name else ("tensor",):
            options = Options(ranks=ranks, split_mode=mode)
            found = plan(spec_of(gguf), gguf, computer("laptop"), CPU, options)
            assert found.mode == (mode if ranks > 1 else "single")


WISHES: dict[str, list[Any]] = {
    "context": [1, 64, 4096, 100_000, 10**6],
    "slots": [1, 16, 100],
    "batch_tokens": [1, 64, 4096],
    "split_mode": ["none", "layer", "tensor", "experts", "row"],
    "ranks": [1, 2, 3, 4, 5, 6],
    "tensor_split": [[1.0, 0.0], [3.0, 1.0], [1.0] * 6, [100.0, 1.0, 1.0, 1.0]],
    "devices": [[0], [1, 0], [5, 2, 3]],
    "gpu_layers": [0, 1, 30, 99],
    "cpu_moe": [1, 99],
    "overrides": [["experts=host", "ffn=CPU"], [r"blk\.[01]\.=cuda:0"], ["embed=pinned"]],
    "fit": [False],
    "host_bytes": [1 << 30, 512 << 30],
    "vram_bytes": [[6 << 30], [80 << 30]],
    "no_mmap": [True],
}  # fmt: skip


def attempt(where: str, model: str, wishes: dict[str, Any]) -> tuple[str, Plan | None]:
    try:
        return "", plan_for(where, model, **wishes)
    except PlanError as error:
        return str(error), None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_any_wish_is_planned_within_memory_or_refused_in_a_sentence(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(40):
        where, model = chance.choice(MACHINES), chance.choice(MODELS)
        wishes = {
            name: chance.choice(each) for name, each in WISHES.items() if chance.random() < 0.2
        }
        refusal, found = attempt(where, model, wishes)
        assert "\n" not in refusal
        if found is None:
            continue
        there = computer(where)
        free = {f"cuda:{gpu.index}": gpu.free_bytes for gpu in there.gpus}
        free = {name: wishes.get("vram_bytes", [size])[0] for name, size in free.items()}
        host = sum(found.shared.values())
        for rank in found.ranks:
            used = sum(rank.memory.values())
            host += sum(rank.host.values()) + (used if rank.device == "cpu" else 0)
            assert rank.device == "cpu" or used + (256 << 20) <= free[rank.device], wishes
        assert host + (256 << 20) <= wishes.get("host_bytes", there.available_bytes), wishes


@pytest.mark.parametrize(
    ("model", "options", "told"),
    [
        ("qwen3-8b-q4km", {"batch_tokens": 65535}, ""),
        ("qwen3-8b-q4km", {"batch_tokens": 65536}, "-b 65536: .* takes 65535 tokens"),
        ("qwen3-8b-q4km", {"slots": 70000}, "-np 70000: .* takes 65535 tokens"),
        ("flash-next-q4", {"batch_tokens": 16384}, "-b 16384: .* takes 16383 tokens"),
    ],
)
def test_a_step_has_no_more_tokens_than_a_grid(
    model: str, options: dict[str, int], told: str
) -> None:
    """Of a model with four residual streams a quarter."""
    backend = msgspec.structs.replace(CUDA, most_tokens=describe("cuda")["most_tokens"])
    gguf, there = header(model), computer("x86-2xh200")
    chosen = Options(context=512, **options)  # type: ignore[arg-type]
    if told:
        with pytest.raises(OptionError, match=told):
            plan(spec_of(gguf), gguf, there, backend, chosen)
    else:
        assert plan(spec_of(gguf), gguf, there, backend, chosen).batch_tokens == 65535
