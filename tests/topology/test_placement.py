"""What leaves VRAM when it does not fit, in which order, and where it goes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from reference import CUDA, computer, header, plan_for, usual
from voltapile.topology.architectures import spec_of
from voltapile.topology.machine import Machine
from voltapile.topology.plan import Backend, Options, Plan, PlanError, unbuilt
from voltapile.topology.planner import plan


def layers_in(found: Plan, tier: str, stem: str) -> list[int]:
    return [
        int(name.split(".")[1])
        for name, each in found.tensors.items()
        if each.tier == tier and f".{stem}." in name
    ]


def with_memory(there: Machine, vram: int, host: int = 0) -> Machine:
    gpus = [msgspec.structs.replace(gpu, free_bytes=vram) for gpu in there.gpus]
    return msgspec.structs.replace(there, gpus=gpus, available_bytes=host or there.available_bytes)


def test_everything_stays_where_it_fits() -> None:
    found = usual("x86-4xv100-32gb", "qwen3-235b-a22b-q3k")
    outside = {name for name, each in found.tensors.items() if each.tier != "vram"}
    assert outside == set(found.shared) == {"token_embd.weight"}


def test_the_embedding_goes_first_then_experts_from_the_first_layer_on() -> None:
    found = usual("x86-2x2080ti", "qwen3-30b-a3b-q4km")
    assert found.tensors["token_embd.weight"].tier == "pinned"
    assert found.shared["token_embd.weight"] == found.tensors["token_embd.weight"].bytes
    assert layers_in(found, "host", "ffn_up_exps") == [0, 1, 2, 3, 4]
    assert layers_in(found, "host", "attn_q") == []
    assert found.context >= 4096
    assert found.notes[0] == (
        "to hold a context of 4096, VRAM goes without the experts of layers 0 to 4 (host)"
    )


def test_no_more_than_needed() -> None:
    """With one layer less outside, the context would not fit."""
    found = usual("x86-2x2080ti", "qwen3-30b-a3b-q4km")
    rank = max(found.ranks, key=lambda rank: sum(rank.memory.values()))
    layer = sum(each.bytes for name, each in found.tensors.items() if name.startswith("blk.4.ffn_"))
    free = 10680 << 20
    left = free - (256 << 20) - sum(rank.memory.values())
    spare = (found.context - 4096) // 64 * sum(rank.page_bytes)
    assert left + spare < layer / 2


def test_a_dense_model_loses_layers_with_their_caches() -> None:
    found = usual("x86-2x2080ti", "qwen35-27b-q8")
    outside = layers_in(found, "host", "ffn_up")
    assert outside == list(range(len(outside)))
    assert 0 < len(outside) < 64
    assert all(rank.host["kv"] > 0 for rank in found.ranks)


def test_a_context_that_is_asked_for_counts() -> None:
    small = plan_for("ac922-6xv100-16gb", "flash-next-q4", context=4096)
    large = plan_for("ac922-6xv100-16gb", "flash-next-q4", context=262144)
    moved = [len(layers_in(each, "pinned", "ffn_up_exps")) for each in (small, large)]
    assert moved[0] < moved[1]
    assert large.context == 262144


def test_gpus_read_host_memory_where_that_is_faster() -> None:
    """AC922: three GPUs at 68 GB/s empty a node's memory; PCIe is slower than the CPU."""
    assert "pinned" in {
        each.tier for each in usual("ac922-6xv100-16gb", "qwen3-235b-a22b-q3k").tensors.values()
    }
    assert layers_in(usual("ac922-6xv100-16gb", "qwen3-235b-a22b-q3k"), "host", "ffn_up_exps") == []
    assert layers_in(usual("x86-2xv100-16gb", "qwen3-235b-a22b-q3k"), "pinned", "ffn_up_exps") == []


def test_what_host_memory_does_not_hold_stays_in_the_file() -> None:
    found = usual("x86-2x2080ti", "flash-next-q4")
    assert found.tensors["per_layer_token_embd.weight"].tier == "mapped"
    assert any(
        "stay in the mapped file and are read from the drive" in note for note in found.notes
    )
    mapped = layers_in(found, "mapped", "ffn_up_exps")
    host = layers_in(found, "host", "ffn_up_exps")
    assert mapped
    assert max(host) < min(mapped) + 1  # the last of those that left VRAM


def test_without_fit_nothing_moves() -> None:
    gguf, there = header("qwen3-8b-q4km"), with_memory(computer("x86-2xv100-16gb"), 8 << 30)
    found = plan(spec_of(gguf), gguf, there, CUDA, Options(fit=False, split_mode="none"))
    assert {each.tier for each in found.tensors.values()} == {"vram"}
    assert found.context < 16384


def test_a_short_context_is_better_than_weights_outside() -> None:
    """As long as nobody asks for more: what is outside VRAM is slow."""
    gguf, there = header("qwen3-8b-q4km"), with_memory(computer("x86-2xv100-16gb"), 7200 << 20)
    found = plan(spec_of(gguf), gguf, there, CUDA, Options(split_mode="none"))
    assert {each.tier for each in found.tensors.values()} == {"vram"}
    assert found.context < 4096


def test_of_one_gpu_the_embedding_goes_first() -> None:
    there, table = computer("x86-2x2080ti"), header("qwen3-8b-q4km")
    tight = with_memory(there, 6950 << 20)
    found = plan(
        spec_of(table), table, tight, CUDA, Options(slots=4, context=512, split_mode="none")
    )
    assert found.notes[0] == (
        "to hold a context of 512, VRAM goes without the token embedding (pinned)"
    )
    assert unbuilt(found) == ""


@pytest.mark.parametrize(
    ("model", "options", "shared_bytes", "is_shared"),
    [
        ("qwen3-8b-q4km", {}, 0, True),
        ("qwen3-8b-q4km", {}, 1 << 30, True),
        ("qwen3-8b-q4km", {}, 64 << 20, False),  # a container's /dev/shm
        ("qwen3-8b-q4km", {"overrides": ["embed=vram"]}, 0, False),
        ("qwen3-8b-q4km", {"split_mode": "layer"}, 0, False),  # one rank has it
        ("qwen3-8b-q4km", {"split_mode": "none"}, 0, False),
    ],
)
def test_one_embedding_serves_all_ranks(
    model: str, options: dict[str, Any], shared_bytes: int, is_shared: bool
) -> None:
    there = msgspec.structs.replace(computer("x86-4xv100-32gb"), shared_bytes=shared_bytes)
    table = header(model)
    chosen = Options(slots=4, **options)
    found = plan(spec_of(table), table, there, CUDA, chosen)
    place = found.tensors["token_embd.weight"]
    assert (place.tier == "pinned") == is_shared
    assert found.shared == ({"token_embd.weight": place.bytes} if is_shared else {})
    assert unbuilt(found) == ""


TABLE = "per_layer_token_embd.weight"


def flash(there: Machine, backend: Backend = CUDA, **options: Any) -> Plan:
    table = header("flash-next-q4")
    return plan(spec_of(table), table, there, backend, Options(**options))


def note_of(found: Plan) -> str:
    (note,) = [note for note in found.notes if note.startswith("the n-gram table")]
    return note.partition(": ")[2]


def test_an_ngram_table_is_pinned_where_it_fits() -> None:
    found = flash(computer("x86-4xv100-32gb"))
    assert found.tensors[TABLE].tier == "pinned"
    assert TABLE in found.shared
    assert found.staged == {}
    assert "pinned in host memory" in note_of(found)
    assert unbuilt(found) == ""


def test_of_an_ngram_table_in_the_file_ranks_keep_room_for_rows() -> None:
    there = computer("x86-4xv100-32gb")
    found, whole = flash(there, overrides=["ngram=mapped"]), flash(there)
    assert found.tensors[TABLE].tier == "mapped"
    assert set(found.shared) == {"token_embd.weight"}
    assert found.staged == {TABLE: 8192 * (8 + 90)}
    assert [rank.host["staging"] for rank in found.ranks] == [8192 * 98] * 4
    assert all("staging" not in rank.host for rank in whole.ranks)
    assert [rank.memory["weights"] for rank in found.ranks] == [
        rank.memory["weights"] for rank in whole.ranks
    ]
    assert note_of(found).endswith("rows of it from the file, by rule")
    assert unbuilt(found) == ""
    reads_none = msgspec.structs.replace(CUDA, staged_rows=0)
    cannot = flash(there, reads_none, overrides=["ngram=mapped"])
    assert cannot.staged == {}
    assert "can be planned and not computed" in unbuilt(cannot)


def test_in_layer_mode_the_rank_with_its_layer_reads_the_table() -> None:
    found = flash(computer("x86-4xv100-32gb"), split_mode="layer", overrides=["ngram=mapped"])
    assert ["staging" in rank.host for rank in found.ranks] == [True, False, False, False]


@pytest.mark.parametrize("fit", [True, False])
def test_a_small_dev_shm_leaves_the_ngram_table_in_the_file(fit: bool) -> None:
    there = msgspec.structs.replace(computer("x86-4xv100-32gb"), shared_bytes=8 << 30)
    found = flash(there, fit=fit)
    assert found.tensors[TABLE].tier == "mapped"
    assert found.tensors["token_embd.weight"].tier == "pinned"
    assert note_of(found).endswith("from the file, since /dev/shm has room for 8.00 GiB")
    assert unbuilt(found) == ""


def test_one_table_may_leave_no_shared_memory_for_the_other() -> None:
    table = header("flash-next-q4").tensors[TABLE].nbytes
    there = msgspec.structs.replace(computer("x86-4xv100-32gb"), shared_bytes=table + (64 << 20))
    found = flash(there)
    assert set(found.shared) == {TABLE}
    assert found.tensors["token_embd.weight"].tier == "vram"


def test_an_ngram_table_larger_than_free_memory_is_left_or_offered() -> None:
    there = computer("x86-4xv100-32gb")
    found = flash(msgspec.structs.replace(there, available_bytes=30 << 30), slots=1)
    assert found.tensors[TABLE].tier == "mapped"
    assert note_of(found).endswith("from the file, for lack of host memory")
    assert unbuilt(found) == ""
    tight = msgspec.structs.replace(there, available_bytes=28 << 30)
    with pytest.raises(PlanError, match=r"on the host.*--ngram-table mapped"):
        flash(tight, fit=False, overrides=["ngram=pinned"])
