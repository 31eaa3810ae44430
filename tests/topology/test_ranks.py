"""Plans of several ranks: modes, shares, CPUs, and every byte of each rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from voltapile.shm.gguf import Gguf
from voltapile.topology import machine
from voltapile.topology.architectures import spec_of
from voltapile.topology.gpu import Gpu
from voltapile.topology.machine import Machine
from voltapile.topology.plan import Backend, Options, Plan, PlanError
from voltapile.topology.planner import plan
from voltapile.topology.ranks import divide_cpus

DATA = Path(__file__).parents[1] / "data"
BACKEND = Backend(
    name="cpu",
    formats=["F32", "F16"],
    kv_types={"f16": (1, 2)},
    page_tokens=64,
    max_decode_rows=8,
    activation_bytes=2.5,
    reserve_bytes=100 << 20,
    captures=True,
    group_bytes=1 << 20,
)
CUDA = msgspec.structs.replace(BACKEND, name="cuda", in_vram=True)


@pytest.fixture
def gguf() -> Iterator[Gguf]:
    with Gguf.open(DATA / "golden-mini" / "llama" / "model-f16.gguf") as gguf:
        yield gguf  # 4 layers, 6 heads, 2 KV heads of 32, ffn 160, 670 tokens


@pytest.fixture
def laptop() -> Machine:
    return machine.load(DATA / "machines" / "laptop.json")


def plan_of(gguf: Gguf, computer: Machine, backend: Backend = BACKEND, **options: object) -> Plan:
    return plan(spec_of(gguf), gguf, computer, backend, Options(**options))  # type: ignore[arg-type]


def with_gpus(computer: Machine, count: int) -> Machine:
    gpus = [
        Gpu(index=i, name="V100", arch=70, memory_bytes=16 << 30, free_bytes=15 << 30)
        for i in range(count)
    ]
    return msgspec.structs.replace(computer, gpus=gpus)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_tensor_mode_covers_the_model(gguf: Gguf, laptop: Machine, ranks: int) -> None:
    found = plan_of(gguf, laptop, ranks=ranks)
    assert (found.mode, found.answer_rank, found.steps_in_flight) == ("tensor", 0, 2)
    assert [rank.rank for rank in found.ranks] == list(range(ranks))
    for name, total in (("heads", 6), ("ffn", 160), ("vocab", 670)):
        ranges = [getattr(rank.share, name) for rank in found.ranks]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == total
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert all(rank.share.layers == [0, 1, 2, 3] for rank in found.ranks)
    assert len({rank.device for rank in found.ranks}) == 1


def test_layer_mode_hands_on(gguf: Gguf, laptop: Machine) -> None:
    found = plan_of(gguf, laptop, ranks=3, split_mode="layer")
    assert (found.mode, found.answer_rank, found.steps_in_flight) == ("layer", 2, 1)
    assert [rank.share.layers for rank in found.ranks] == [[0], [1, 2], [3]]
    (cache,) = found.caches
    assert [rank.page_bytes for rank in found.ranks] == [
        [cache.page_bytes // 4], [cache.page_bytes // 2], [cache.page_bytes // 4],
    ]  # fmt: skip
    assert found.tensors["token_embd.weight"].ranks == [0, 2]  # tied: it is the output matrix too
    assert found.tensors["output_norm.weight"].ranks == [2]
    assert found.tensors["blk.2.attn_q.weight"].ranks == [1]
    with pytest.raises(PlanError, match="rank 1 would have none of the 4 layers; use fewer ranks"):
        plan_of(gguf, laptop, ranks=6, split_mode="layer")


def test_bytes_of_each_rank_by_hand(gguf: Gguf, laptop: Machine) -> None:
    """6 heads over 2: three heads and one KV head each, 96 of 160 columns and 64."""
    found = plan_of(gguf, laptop, ranks=2, context=640, slots=2)
    for rank in found.ranks:
        memory = rank.memory
        assert rank.page_bytes == [64 * 4 * 1 * (32 + 32) * 2]
        assert memory["kv"] == (1 + 2 * 10) * rank.page_bytes[0]
        assert memory["communication"] == 2 << 20
        assert memory["reserve"] == 100 << 20
        ffn = rank.share.ffn[1] - rank.share.ffn[0]
        columns = 4 * 96 * (3 * 32 + ffn) * 2  # attn_output and ffn_down of 4 layers, copied
        assert columns < memory["weights"] <= columns + (4 << 20)
    assert [rank.share.ffn for rank in found.ranks] == [(0, 64), (64, 160)]
    alone = plan_of(gguf, laptop, context=640, slots=2).ranks[0].memory
    assert "communication" not in alone


def test_what_is_cut_and_how(gguf: Gguf, laptop: Machine) -> None:
    tensors = plan_of(gguf, laptop, ranks=2).tensors
    split = {name: tensors[f"blk.0.{name}.weight"].split for name in ("attn_q", "attn_output")}
    assert split == {"attn_q": "rows", "attn_output": "columns"}
    assert tensors["blk.0.attn_norm.weight"].split == "none"
    assert all(each.ranks == [0, 1] for each in tensors.values())


def test_more_ranks_than_kv_heads_keep_copies(gguf: Gguf, laptop: Machine) -> None:
    found = plan_of(gguf, laptop, ranks=4)
    assert [rank.share.kv_heads for rank in found.ranks] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    pages = {cache.pages for cache in found.caches}
    assert len(pages) == 1  # common to all ranks


def test_all_ranks_share_the_machine(gguf: Gguf, laptop: Machine) -> None:
    alone = plan_of(gguf, laptop, context=512, slots=1)
    least = sum(alone.ranks[0].memory.values()) + (256 << 20) + gguf.tensor_bytes
    small = msgspec.structs.replace(laptop, available_bytes=least + (8 << 20))
    plan_of(gguf, small, context=512, slots=1)
    with pytest.raises(PlanError, match=r"communication 9\.0 MiB.*reserve 300\.0 MiB"):
        plan_of(gguf, small, ranks=3, context=512, slots=1)


def test_proportions(gguf: Gguf, laptop: Machine) -> None:
    found = plan_of(gguf, laptop, tensor_split=[2.0, 1.0])
    assert [rank.share.heads for rank in found.ranks] == [(0, 4), (4, 6)]
    left_out = plan_of(gguf, with_gpus(laptop, 3), CUDA, tensor_split=[1.0, 0.0, 1.0])
    assert [rank.device for rank in left_out.ranks] == ["cuda:0", "cuda:2"]
    alone = plan_of(gguf, with_gpus(laptop, 3), CUDA, tensor_split=[0.0, 0.0, 1.0])
    assert (alone.mode, alone.ranks[0].device) == ("single", "cuda:2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": -1}, "--ranks -1: expected 1 to 56"),
        ({"ranks": 65}, "--ranks 65: expected 1 to 56"),
        ({"ranks": 2, "tensor_split": [1.0]}, "-ts 1: 1 parts for 2 rank.*one number for each"),
        ({"tensor_split": [0.0, 0.0]}, "-ts 0,0: all parts are 0; give at least one"),
        ({"tensor_split": [1.0, -1.0]}, "-ts 1,-1: expected numbers that are not negative"),
        ({"tensor_split": [1.0, float("nan")]}, "-ts 1,nan: expected numbers"),
        ({"steps_in_flight": 17}, "--steps-in-flight 17: expected 1 to 16, or 0 to choose"),
        ({"ranks": 2, "islands": [0]}, "--islands 0: expected a number for each of 2 rank"),
        ({"ranks": 2, "split_mode": "none"}, "-sm none computes on one rank, but --ranks is 2"),
        ({"ranks": 2, "split_mode": "experts"}, "a llama model has no experts; use -sm tensor"),
        ({"ranks": 2, "split_mode": "columns"}, "-sm columns: expected one of none, layer"),
    ],
)
def test_refused(gguf: Gguf, laptop: Machine, options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(gguf, laptop, **options)


def test_steps_in_flight(gguf: Gguf, laptop: Machine) -> None:
    assert plan_of(gguf, laptop, steps_in_flight=1).steps_in_flight == 1
    found = plan_of(gguf, laptop, ranks=2, split_mode="layer", steps_in_flight=3)
    assert found.steps_in_flight == 3


def test_islands_may_be_declared(gguf: Gguf, laptop: Machine) -> None:
    assert plan_of(gguf, laptop, ranks=2, islands=[0, 1]).islands == [0, 1]
    assert plan_of(gguf, laptop, ranks=2).islands == []


def test_row_mode_is_tensor_mode(gguf: Gguf, laptop: Machine) -> None:
    found = plan_of(gguf, laptop, ranks=2, split_mode="row")
    assert found.mode == "tensor"
    assert found.warnings == ["-sm row: taken as -sm tensor, which cuts rows of all matrices"]


def test_devices(gguf: Gguf, laptop: Machine) -> None:
    computer = with_gpus(laptop, 4)
    found = plan_of(gguf, computer, CUDA, ranks=2, devices=[3, 1])
    assert [rank.device for rank in found.ranks] == ["cuda:3", "cuda:1"]
    assert {each.tier for each in found.tensors.values()} == {"vram"}
    with pytest.raises(PlanError, match="--ranks 5: this machine has 4 GPU"):
        plan_of(gguf, computer, CUDA, ranks=5)
    with pytest.raises(PlanError, match="--device cuda:7: no such GPU; there is cuda:0, cuda:1"):
        plan_of(gguf, computer, CUDA, devices=[0, 7])
    with pytest.raises(PlanError, match="--device cuda:1: named twice"):
        plan_of(gguf, computer, CUDA, devices=[1, 0, 1])


# --- CPUs -----------------------------------------------------------------------------------------


def test_cpus_are_divided(laptop: Machine) -> None:
    servers = machine.load(DATA / "machines" / "two-sockets.json")
    assert divide_cpus(servers, 2, 0, []) == [(0, list(range(8))), (1, list(range(8, 16)))]
    assert divide_cpus(servers, 4, 0, []) == [
        (0, [0, 1, 2, 3]), (0, [4, 5, 6, 7]), (1, [8, 9, 10, 11]), (1, [12, 13, 14, 15]),
    ]  # fmt: skip
    assert [len(cpus) for _, cpus in divide_cpus(servers, 3, 10, [])] == [3, 4, 3]
    limited = msgspec.structs.replace(laptop, cpu_limit=2.0)
    warnings: list[str] = []
    assert divide_cpus(limited, 3, 0, warnings) == [(0, [0]), (0, [1]), (0, [2])]
    assert warnings == []
    divide_cpus(laptop, 3, 2, warnings)
    assert warnings == ["-t 2: each of 3 ranks has one thread at least"]
    divide_cpus(laptop, 3, 99, warnings)
    assert warnings[1:] == ["-t 99: this process may use 12 CPUs"]


def test_cpus_near_a_gpu(laptop: Machine) -> None:
    servers = machine.load(DATA / "machines" / "two-sockets.json")
    assert divide_cpus(servers, 1, 0, [], [1]) == [(1, list(range(8, 16)))]
    assert divide_cpus(servers, 1, 2, [], [0]) == [(0, [0, 1])]
    assert divide_cpus(servers, 3, 0, [], [1, 0, 1]) == [
        (1, [8, 9, 10, 11]), (0, list(range(8))), (1, [12, 13, 14, 15]),
    ]  # fmt: skip
    assert divide_cpus(servers, 1, 0, [], [7]) == divide_cpus(servers, 1, 0, [])  # no such node


def test_ranks_outnumber_cpus(laptop: Machine) -> None:
    node = msgspec.structs.replace(laptop.nodes[0], cpus=[0, 1], cores=2)
    small = msgspec.structs.replace(laptop, nodes=[node])
    found = divide_cpus(small, 6, 0, [])
    assert [cpus for _, cpus in found] == [[0], [1], [0], [1], [0], [1]]
