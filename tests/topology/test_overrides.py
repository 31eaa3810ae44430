"""Rules of -ot, --n-cpu-moe and -ngl: order, roles, places, and what they took."""

from __future__ import annotations

from typing import Any

import pytest
from reference import header, plan_for
from voltapile.topology.architectures import spec_of
from voltapile.topology.overrides import ROLES, layer_of, role_of, split_rules
from voltapile.topology.plan import Plan, PlanError, unbuilt

WHERE = "x86-4xv100-32gb"
UP, DOWN = "blk.3.ffn_up_exps.weight", "blk.3.ffn_down_exps.weight"


def moe(*rules: str, **options: Any) -> Plan:
    return plan_for(WHERE, "qwen3-30b-a3b-q4km", overrides=list(rules), ranks=2, **options)


def tier(found: Plan, name: str) -> str:
    return found.tensors[name].tier


def test_the_first_rule_that_matches_is_obeyed() -> None:
    one = moe("ffn_up_exps=pinned", "_exps=CPU")
    assert (tier(one, UP), tier(one, DOWN)) == ("pinned", "host")
    assert [each.tensors for each in one.overrides] == [48, 96]
    assert one.warnings == []
    other = moe("_exps=CPU", "ffn_up_exps=pinned")
    assert (tier(other, UP), tier(other, DOWN)) == ("host", "host")
    assert [each.tensors for each in other.overrides] == [144, 0]
    assert other.warnings == [
        "-ot ffn_up_exps=pinned: takes nothing, since what it matches is taken before by "
        "-ot _exps=CPU; put it first"
    ]


def test_rules_between_commas_and_commas_in_rules() -> None:
    assert split_rules("a=CPU,b=pinned") == ["a=CPU", "b=pinned"]
    assert split_rules(r"blk\.\d{1,2}\.x=CPU,b=host") == [r"blk\.\d{1,2}\.x=CPU", "b=host"]
    found = moe(r"blk\.\d{1,1}\.ffn_.*_exps=CPU,head=pinned")
    assert tier(found, UP) == "host"
    assert tier(found, "blk.10.ffn_up_exps.weight") == "vram"
    assert tier(found, "output.weight") == "pinned"


def test_bytes_are_told() -> None:
    (taken,) = moe("experts[0-11]=host").overrides
    assert (taken.tensors, taken.place) == (36, "host")
    sizes = header("qwen3-30b-a3b-q4km").tensors
    assert taken.bytes == sum(
        each.nbytes for name, each in sizes.items() if "_exps" in name and layer_of(name) < 12
    )


def test_what_leaves_vram_is_counted_in_host_memory() -> None:
    plain, moved = moe(), moe("experts=host")
    for before, after in zip(plain.ranks, moved.ranks, strict=True):
        gone = before.memory["weights"] - after.memory["weights"]
        assert after.host["weights"] == pytest.approx(gone, rel=0.05)  # less what pieces round up
    assert "computed yet" in unbuilt(moved)


def test_rules_of_roles() -> None:
    spec = spec_of(header("flash-next-q4"))
    roles = {name: role_of(name, spec) for name in header("flash-next-q4").tensors}
    assert set(roles.values()) == set(ROLES) - {"ffn"}
    for name, role in {
        "token_embd.weight": "embed", "output.weight": "head", "output_hc_up.weight": "streams",
        "per_layer_token_embd.weight": "ngram", "blk.0.attn_qkv.weight": "delta_net",
        "blk.3.attn_q.weight": "attention", "blk.0.ffn_gate_inp.weight": "router",
        "blk.0.ffn_up_shexp.weight": "shared_expert", "blk.3.indexer.q_proj.weight": "indexer",
        "blk.1.ple_key.weight": "ple", "blk.0.hc_ffn_down.weight": "streams",
        "blk.0.ssm_norm.weight": "norm", "blk.0.ssm_out.weight": "delta_net",
    }.items():  # fmt: skip
        assert roles[name] == role, name
    found = plan_for(WHERE, "flash-next-q4", overrides=["ngram=mapped", "gdn[0]=host"])
    assert tier(found, "per_layer_token_embd.weight") == "mapped"
    assert tier(found, "blk.0.ssm_out.weight") == "host"
    assert tier(found, "blk.1.ssm_out.weight") == "vram"


def test_n_cpu_moe_comes_behind_rules() -> None:
    found = moe("experts[0]=pinned", cpu_moe=2)
    tiers = [tier(found, f"blk.{layer}.ffn_up_exps.weight") for layer in range(3)]
    assert tiers == ["pinned", "host", "vram"]
    assert [(each.rule, each.tensors) for each in found.overrides] == [
        ("-ot experts[0]=pinned", 3), ("--n-cpu-moe 2", 3),
    ]  # fmt: skip
    with pytest.raises(PlanError, match="--n-cpu-moe 2: a qwen3 model has no experts; leave it"):
        plan_for(WHERE, "qwen3-8b-q4km", cpu_moe=2)


def test_layers_as_llama_server_counts_them() -> None:
    """36 layers and the output matrix: -ngl 37 is all, -ngl 30 leaves the first 7 out."""

    def dense(layers: int) -> Plan:
        return plan_for(WHERE, "qwen3-8b-q4km", gpu_layers=layers, ranks=1, context=4096)

    assert unbuilt(dense(37)) == unbuilt(dense(99)) == ""
    found = dense(30)
    tiers = [tier(found, f"blk.{layer}.ffn_up.weight") for layer in range(36)]
    assert tiers == ["host"] * 7 + ["vram"] * 29
    assert tier(found, "output.weight") == "vram"
    pages = found.caches[0].pages
    assert found.ranks[0].host["kv"] == pages * found.caches[0].page_bytes * 7 // 36
    assert found.ranks[0].memory["kv"] == pages * found.caches[0].page_bytes * 29 // 36
    nothing = dense(0)
    assert {each.tier for each in nothing.tensors.values()} == {"host"}


def test_a_whole_tensor_on_one_gpu() -> None:
    found = moe(r"blk\.(0|1)\.ffn.*=CUDA0", r"blk\.2\.ffn.*=rank:1", r"_exps=CPU")
    first = found.tensors["blk.0.ffn_up_exps.weight"]
    assert (first.tier, first.ranks, first.split) == ("vram", [0], "none")
    assert found.tensors["blk.2.ffn_up_exps.weight"].ranks == [1]
    assert found.tensors["blk.3.ffn_up_exps.weight"].tier == "host"
    gap = found.ranks[0].memory["weights"] - found.ranks[1].memory["weights"]
    layer = sum(
        found.tensors[f"blk.0.ffn_{part}_exps.weight"].bytes for part in ("up", "gate", "down")
    )
    assert gap == pytest.approx(layer, rel=0.1)
    placed = moe("output=cuda:1")
    assert placed.tensors["output.weight"].ranks == [1]
    assert "placing tensors on one GPU can be planned and not computed yet" in unbuilt(placed)


def test_fit_leaves_what_rules_say() -> None:
    found = plan_for("x86-2x2080ti", "qwen3-30b-a3b-q4km", overrides=["experts[0-3]=vram"])
    tiers = [tier(found, f"blk.{layer}.ffn_up_exps.weight") for layer in range(12)]
    assert tiers[:4] == ["vram"] * 4
    assert tiers[4] == "host"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("(=CPU", r"-ot \(=CPU: \( is no regular expression \(missing \), unterminated"),
        ("exps", "-ot exps: expected regex=place, e.g. experts=host or ffn_"),
        ("=CPU", "-ot =CPU: expected regex=place"),
        ("exps=", "-ot exps=: expected regex=place"),
        (
            "exps=moon",
            r"there is no place 'moon'; expected vram, pinned, host \(CPU\), mapped or a",
        ),
        ("exps=CUDA7", r"there is no place 'CUDA7'; .* that is used \(cuda:0, cuda:1\)"),
        ("exps=rank:2", "there is no place 'rank:2'"),
    ],
)
def test_refused(rule: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        moe(rule)
    assert "\n" not in str(caught.value)


def test_a_rule_that_matches_nothing() -> None:
    assert moe("ffn_gate_tid2eid=CPU").warnings == [
        "-ot ffn_gate_tid2eid=CPU: matches no tensor of this model"
    ]


def test_the_cpu_takes_rules_of_its_own_memory() -> None:
    """So that a script for a machine with GPUs also runs on one without."""
    found = plan_for("laptop", "qwen3-8b-q4km", overrides=["ffn=CPU"], context=512)
    assert {each.tier for each in found.tensors.values()} == {"mapped"}
    assert found.overrides == []
    with pytest.raises(PlanError, match="no regular expression"):
        plan_for("laptop", "qwen3-8b-q4km", overrides=["(=CPU"])
    unknown = plan_for("laptop", "qwen3-8b-q4km", overrides=["exps=CPU"], context=512)
    assert unknown.warnings == ["-ot exps=CPU: matches no tensor of this model"]
