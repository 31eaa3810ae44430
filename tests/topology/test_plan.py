"""Plan: arithmetic of memory, context, pages and threads, on machines that one does not own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from voltapile.shm.gguf import Gguf
from voltapile.topology import machine
from voltapile.topology.architectures import spec_of
from voltapile.topology.gpu import Gpu
from voltapile.topology.machine import Machine
from voltapile.topology.plan import (
    Backend,
    Options,
    Plan,
    PlanError,
    from_json,
    plan_id,
    to_json,
)
from voltapile.topology.planner import largest_context, plan
from voltapile.topology.spec import Spec

DATA = Path(__file__).parents[1] / "data"
BACKEND = Backend(
    name="cpu",
    formats=["F32", "F16"],
    kv_types={"f16": (1, 2), "f32": (1, 4), "q8_0": (32, 34), "odd": (48, 50)},
    page_tokens=64,
    max_decode_rows=8,
    activation_bytes=2.5,
    reserve_bytes=100 << 20,
    captures=True,
)
PAGE = 64 * 4 * 2 * (32 + 32) * 2  # positions, layers, KV heads, values, bytes of f16
MARGIN = 256 << 20


@pytest.fixture
def gguf() -> Iterator[Gguf]:
    with Gguf.open(DATA / "golden-mini" / "llama" / "model-f16.gguf") as gguf:
        yield gguf


@pytest.fixture
def spec(gguf: Gguf) -> Spec:
    return spec_of(gguf)


@pytest.fixture
def laptop() -> Machine:
    return machine.load(DATA / "machines" / "laptop.json")


@pytest.fixture
def servers() -> Machine:
    return machine.load(DATA / "machines" / "two-sockets.json")


def with_memory(computer: Machine, nbytes: int) -> Machine:
    return msgspec.structs.replace(computer, available_bytes=nbytes)


def fixed(found: Plan) -> int:
    memory = found.ranks[0].memory
    return memory["scratch"] + memory["reserve"]


def test_where_memory_is_plenty(gguf: Gguf, spec: Spec, laptop: Machine) -> None:
    found = plan(spec, gguf, laptop, BACKEND, Options())
    assert (found.context, found.slots, found.buckets) == (4096, 4, [1, 2, 3, 4])
    (cache,) = found.caches
    assert (cache.kind, cache.layers, cache.page_tokens) == ("full", [0, 1, 2, 3], 64)
    assert (cache.key_type, cache.value_type) == ("f16", "f16")  # the backend's first
    assert cache.page_bytes == PAGE
    assert cache.pages == 1 + 4 * 4096 // 64
    (rank,) = found.ranks
    assert rank.memory["kv"] == cache.pages * PAGE
    assert rank.memory["reserve"] == 100 << 20
    assert rank.memory["weights"] == 0
    assert rank.mapped_bytes == gguf.tensor_bytes
    assert (found.alias, found.architecture, found.backend) == ("model-f16", "llama", "cpu")
    assert (found.steps_in_flight, found.answer_rank, found.warnings) == (2, 0, [])
    assert found.choices["cache_type_k"] == "f16"


def test_every_tensor_is_placed(gguf: Gguf, spec: Spec, laptop: Machine) -> None:
    placed = plan(spec, gguf, laptop, BACKEND, Options()).tensors
    assert placed.keys() == gguf.tensors.keys()
    assert {each.tier for each in placed.values()} == {"mapped"}
    assert sum(each.bytes for each in placed.values()) == gguf.tensor_bytes
    assert placed["token_embd.weight"].type == "F16"


def test_scratch_holds_what_a_step_allocates(gguf: Gguf, spec: Spec, laptop: Machine) -> None:
    """The arrays of models/llama.py, one by one, for 100 tokens and 3 sampled rows."""
    T, R = 100, 3
    options = Options(batch_tokens=T, slots=R)
    scratch = plan(spec, gguf, laptop, BACKEND, options).ranks[0].memory["scratch"]
    floats = [T * 96, T * 32, R * 96, R * 96, R * 670]  # residual, angles, rows, norm, logits
    floats += [T * 96, T * 192, T * 64, T * 64, T * 192]  # norm, q, k, v, attention
    floats += [T * 96, T * 160, T * 160]  # norm, gate and up
    quantised = [T * 96, T * 192, T * 96, T * 160, R * 96]
    needed = 4 * sum(floats) + math.ceil(2.5 * sum(quantised)) + 64 * 20
    assert needed <= scratch <= 2 * needed


def test_options_are_obeyed(gguf: Gguf, spec: Spec, laptop: Machine) -> None:
    options = Options(
        context=1000, slots=12, batch_tokens=128, cache_type_k="q8_0", cache_type_v="f32",
        alias="me", endpoint="tcp://127.0.0.1:5555", threads=3,
    )  # fmt: skip
    found = plan(spec, gguf, laptop, BACKEND, options)
    assert (found.context, found.slots, found.batch_tokens) == (1000, 12, 128)
    assert found.buckets == list(range(1, 9))  # no more than the backend captures
    assert found.caches[0].page_bytes == 64 * 4 * 2 * (34 + 128)
    assert found.caches[0].pages == 1 + 12 * 16
    assert (found.alias, found.endpoint) == ("me", "tcp://127.0.0.1:5555")
    assert found.ranks[0].cpus == [0, 1, 2]
    eager = msgspec.structs.replace(BACKEND, captures=False)
    assert plan(spec, gguf, laptop, eager, options).buckets == []


def test_pages_shrink_before_the_context(gguf: Gguf, spec: Spec, laptop: Machine) -> None:
    ample = plan(spec, gguf, laptop, BACKEND, Options())
    room = fixed(ample) + MARGIN + gguf.tensor_bytes + (1 << 20)
    found = plan(spec, gguf, with_memory(laptop, room + 100 * PAGE), BACKEND, Options())
    assert found.context == 4096
    assert 64 + 1 <= found.caches[0].pages <= 100 + 16
    assert found.warnings == []


def test_context_shrinks_to_what_fits(gguf: Gguf, spec: Spec, laptop: Machine) -> None:
    ample = plan(spec, gguf, laptop, BACKEND, Options())
    small = with_memory(laptop, fixed(ample) + MARGIN + gguf.tensor_bytes + 32 * PAGE)
    found = plan(spec, gguf, small, BACKEND, Options())
    assert 512 <= found.context <= 32 * 64
    assert found.context % 64 == 0
    assert found.caches[0].pages == 1 + found.context // 64
    memory = found.ranks[0].memory
    assert sum(memory.values()) + MARGIN + gguf.tensor_bytes <= small.available_bytes
    largest = largest_context(spec, gguf, small, BACKEND, Options())
    (warning,) = found.warnings
    assert f"{found.context} of the 4096 trained tokens for lack of memory" in warning
    assert f"up to -c {min(4096, largest)} would fit, but then the model's 0.9 MiB do" in warning
    chosen = plan(spec, gguf, small, BACKEND, Options(context=found.context))
    assert chosen.warnings == []  # was asked for
    assert plan(spec, gguf, small, BACKEND, Options(context=largest)).context == largest
    with pytest.raises(PlanError, match="not enough memory"):
        plan(spec, gguf, small, BACKEND, Options(context=largest + 1))


def test_not_enough_memory_says_numbers_and_options(
    gguf: Gguf, spec: Spec, laptop: Machine
) -> None:
    with pytest.raises(PlanError) as caught:
        plan(spec, gguf, laptop, BACKEND, Options(context=2 * 10**7))
    message = str(caught.value)
    assert "cache for a context of 20000000 19.4" in message
    assert "9.75 GiB available (256.0 MiB kept free): use -c 99" in message
    assert "\n" not in message
    assert "--margin" not in message
    with pytest.raises(PlanError, match="kept free; a smaller --margin would do"):
        plan(spec, gguf, laptop, BACKEND, Options(context=64, margin_bytes=laptop.available_bytes))
    with pytest.raises(PlanError, match="or -ctk q8_0 -ctv q8_0"):
        plan(spec, gguf, laptop, BACKEND, Options(context=12 * 10**6))
    with pytest.raises(PlanError, match="use a smaller model or quantisation"):
        plan(spec, gguf, with_memory(laptop, 1 << 20), BACKEND, Options())
    assert largest_context(spec, gguf, with_memory(laptop, 1 << 20), BACKEND, Options()) == 0


def test_a_file_that_does_not_stay_in_memory(gguf: Gguf, spec: Spec, laptop: Machine) -> None:
    ample = plan(spec, gguf, laptop, BACKEND, Options())
    tight = with_memory(laptop, fixed(ample) + MARGIN + 12 * PAGE)
    found = plan(spec, gguf, tight, BACKEND, Options())
    assert found.context == 512
    assert found.warnings[0].endswith("for lack of memory")
    assert "do not stay in memory" in found.warnings[1]
    tiny = msgspec.structs.replace(laptop, memory_bytes=500_000)
    with pytest.raises(PlanError, match=r"tensors take 0.9 MiB, but this machine has 0.5 MiB"):
        plan(spec, gguf, tiny, BACKEND, Options())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(context=-1), "-c -1: expected 0 to"),
        (Options(slots=-1), "-np -1: expected 0 to"),
        (Options(threads=-2), "-t -2: expected 0 to"),
        (Options(batch_tokens=0), "-b 0: expected 1 to"),
        (Options(cache_type_k="f8"), "-ctk f8: the cpu backend has no such cache type; supported"),
        (Options(cache_type_v="odd"), "-ctv odd: heads of 32 values are no multiple of its block"),
    ],
)
def test_refused_options(
    gguf: Gguf, spec: Spec, laptop: Machine, options: Options, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan(spec, gguf, laptop, BACKEND, options)


def test_a_tensor_type_that_the_backend_lacks(gguf: Gguf, spec: Spec, laptop: Machine) -> None:
    backend = msgspec.structs.replace(BACKEND, formats=["F32", "Q4_K"])
    with pytest.raises(
        PlanError, match=r"'token_embd.weight' has type F16, which the cpu .*supported: F32, Q4_K"
    ):
        plan(spec, gguf, laptop, backend, Options())


def test_odd_wishes_are_warned_of(gguf: Gguf, spec: Spec, laptop: Machine) -> None:
    found = plan(spec, gguf, laptop, BACKEND, Options(context=5000, threads=99, batch_tokens=8))
    assert len(found.warnings) == 3
    assert found.context == 5000
    assert found.ranks[0].threads == 12


def test_threads_take_one_node_first(gguf: Gguf, spec: Spec, servers: Machine) -> None:
    def cpus(threads: int, computer: Machine = servers) -> tuple[int, list[int]]:
        rank = plan(spec, gguf, computer, BACKEND, Options(threads=threads)).ranks[0]
        assert rank.threads == len(rank.cpus)
        return rank.node, rank.cpus

    assert cpus(0) == (1, list(range(8, 16)))  # as many cores as node 0, but more free memory
    assert cpus(2) == (1, [8, 9])
    assert cpus(16) == (1, [*range(8, 16), *range(8)])
    assert cpus(17) == (1, [*range(8, 16), *range(8), 24])
    limited = msgspec.structs.replace(servers, cpu_limit=2.5)
    assert cpus(0, limited) == (1, [8, 9])
    assert cpus(4, limited) == (1, [8, 9, 10, 11])


def test_json_round_trip_and_id(gguf: Gguf, spec: Spec, laptop: Machine) -> None:
    found = plan(spec, gguf, laptop, BACKEND, Options())
    assert from_json(to_json(found)) == found
    assert found.id == plan_id(found)
    assert found.endpoint.endswith(f"/{found.id}.sock")
    assert len(found.endpoint.removeprefix("ipc://")) <= 107
    again = plan(spec, gguf, laptop, BACKEND, Options())
    assert (again.id, again.endpoint) == (found.id, found.endpoint)
    other = plan(spec, gguf, laptop, BACKEND, Options(slots=3))
    named = plan(spec, gguf, laptop, BACKEND, Options(endpoint="ipc:///tmp/x"))
    assert len({found.id, other.id, named.id}) == 3
    assert from_json(to_json(named)) == named
    moved = msgspec.structs.replace(found, endpoint=f"ipc:///run/elsewhere/{found.id}.sock")
    assert plan_id(moved) == found.id  # another user's folder, the same Plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": 5}, "has been changed: its digest is"),
        ({"version": 2}, "version 2, expected 1"),
        ({"slots": "four"}, "not a plan: Expected `int`"),
    ],
)
def test_changed_json(
    gguf: Gguf, spec: Spec, laptop: Machine, changes: dict[str, Any], message: str
) -> None:
    fields = msgspec.json.decode(to_json(plan(spec, gguf, laptop, BACKEND, Options())))
    with pytest.raises(PlanError, match=message):
        from_json(msgspec.json.encode(fields | changes))
    with pytest.raises(PlanError, match="not a plan"):
        from_json("{")


def test_alias_of_a_split_file(gguf: Gguf, spec: Spec, laptop: Machine) -> None:
    class Shards:
        tensors = gguf.tensors
        paths = ("/m/Big-Q8_0-00001-of-00002.gguf", "/m/Big-Q8_0-00002-of-00002.gguf")

    found = plan(spec, Shards(), laptop, BACKEND, Options())
    assert found.alias == "Big-Q8_0"
    assert found.model == list(Shards.paths)


def test_a_window_group_has_its_own_pool(laptop: Machine) -> None:
    with Gguf.open(DATA / "golden-mini" / "gemma3" / "model-f16.gguf") as gguf:
        found = plan(spec_of(gguf), gguf, laptop, BACKEND, Options(batch_tokens=128))
    full, sliding = found.caches
    assert (full.kind, full.layers, full.pages) == ("full", [5], 1 + 4 * 4096 // 64)
    assert (sliding.kind, sliding.layers, sliding.window) == ("window", [0, 1, 2, 3, 4], 24)
    assert sliding.pages == 1 + 4 * 5 + 4  # each slot twice a window, and two steps in flight
    assert sliding.page_bytes == 5 * full.page_bytes
    memory = found.ranks[0].memory
    assert memory["kv"] == full.pages * full.page_bytes + sliding.pages * sliding.page_bytes
    small = plan(spec_of(gguf), gguf, laptop, BACKEND, Options(context=100, slots=1))
    assert [group.pages for group in small.caches] == [3, 3]


# --- a GPU --------------------------------------------------------------------------------------

IN_VRAM = msgspec.structs.replace(
    BACKEND, name="cuda", in_vram=True, workspace_bytes=1 << 20, choices={"cublas_from": "96"}
)


def with_gpu(computer: Machine, nbytes: int) -> Machine:
    gpu = Gpu(index=0, name="V100", arch=70, memory_bytes=16 << 30, free_bytes=nbytes)
    return msgspec.structs.replace(computer, gpus=[gpu])


def test_everything_lives_in_vram(gguf: Gguf, spec: Spec, laptop: Machine) -> None:
    found = plan(spec, gguf, with_gpu(laptop, 2 << 30), IN_VRAM, Options())
    (rank,) = found.ranks
    assert rank.device == "cuda:0"
    assert {each.tier for each in found.tensors.values()} == {"vram"}
    assert gguf.tensor_bytes < rank.memory["weights"] < gguf.tensor_bytes + (64 << 20)
    assert sum(rank.memory.values()) + MARGIN <= 2 << 30
    assert found.choices["cublas_from"] == "96"


def test_what_does_not_fit_into_vram_is_told(gguf: Gguf, spec: Spec, laptop: Machine) -> None:
    small = with_gpu(laptop, 400 << 20)
    with pytest.raises(PlanError, match=r"weights 64\.0 MiB, .*or -ngl 0 for the CPU"):
        plan(spec, gguf, small, IN_VRAM, Options(context=4096))
    with pytest.raises(PlanError, match="no GPU"):
        plan(spec, gguf, laptop, IN_VRAM, Options())
