"""Specs of models with experts, delta nets and sparse attention, from the golden files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.shm.gguf import Gguf
from voltapile.topology.architectures import spec_of
from voltapile.topology.choices import as_chosen
from voltapile.topology.hybrids import _multipliers, _primes_from
from voltapile.topology.spec import CacheNeed, DeltaNet, Experts, Indexer, Spec, SpecError

TESTS = Path(__file__).parents[1]
MINI = TESTS / "data" / "golden-mini"
LARGE = TESTS.parents[1] / "shared" / "golden"
LARGE_NAMES = [
    "qwen3moe/model-Q8_0", "qwen3moe-k/model-Q4_K_M", "qwen35/model-IQ4_NL", "qwen35-k/model-IQ3_S",
    "qwen35moe/model-Q8_0", "qwen35moe-mtp/model-Q8_0", "qwen3next/model-Q8_0",
    "qwen4exp/model-Q8_0", "qwen4exp-k/model-Q4_K_M",
]  # fmt: skip

HASHES = "layer_multipliers", "head_vocab_sizes", "head_offsets"

Open = Callable[[str], Gguf]


@pytest.fixture
def mini() -> Iterator[Open]:
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(Gguf.open(MINI / name / "model-f16.gguf"))


def changed(gguf: Gguf, keys: dict[str, Any], missing: tuple[str, ...] = ()) -> Spec:
    """The Spec of a file with other metadata and without some tensors."""
    full = {f"{gguf.architecture}.{key}": value for key, value in keys.items()}
    merged = {**gguf.metadata, **full}
    gguf.metadata = {key: value for key, value in merged.items() if value is not None}
    gguf.tensors = {name: each for name, each in gguf.tensors.items() if name not in missing}
    return spec_of(gguf)


def test_qwen3moe(mini: Open) -> None:
    spec = spec_of(mini("qwen3moe"))
    assert spec.experts == Experts(count=10, used=3, ffn=32)
    assert (spec.ffn, spec.rope.layout, spec.delta, spec.has_output_gate) == (
        0,
        "neox",
        None,
        False,
    )
    assert [need.layers for need in spec.caches] == [(0, 1, 2)]


def test_qwen35(mini: Open) -> None:
    spec = spec_of(mini("qwen35"))
    assert spec.delta == DeltaNet(
        layers=(0, 2, 4), key_heads=2, value_heads=6, head_dim=32, conv_kernel=4, is_tiled=True
    )
    assert [spec.delta.key_head(head) for head in range(6)] == [0, 1, 0, 1, 0, 1]
    assert spec.caches == (
        CacheNeed(kind="full", layers=(1, 3), kv_heads=1, key_dim=64, value_dim=64),
    )
    assert spec.has_output_gate
    assert (spec.rope.layout, spec.rope.dims, spec.rope.sections) == ("imrope", 16, (3, 3, 2, 0))
    assert (spec.experts, spec.ffn, spec.tied) == (None, 96, True)


def test_qwen35moe_and_qwen3next(mini: Open) -> None:
    spec = spec_of(mini("qwen35moe"))
    assert spec.experts == Experts(count=8, used=2, ffn=32, shared_ffn=32)
    assert spec.ffn == 0
    grouped = spec_of(mini("qwen3next"))
    assert grouped.delta is not None
    assert [grouped.delta.key_head(head) for head in range(6)] == [0, 0, 0, 1, 1, 1]
    assert grouped.rope.layout == "neox"


def test_qwen4exp(mini: Open) -> None:
    spec = spec_of(mini("qwen4exp"))
    assert (spec.streams, spec.stream_rank) == (4, 12)
    grams = spec.ngrams
    assert grams is not None
    assert (grams.layer, grams.size, grams.heads, grams.conv_kernel) == (2, 3, 8, 4)
    assert (grams.rows, grams.row_width) == (672, 8)
    assert spec.indexer == Indexer(heads=8, key_dim=32, top_k=32, block=4, layers=(1, 3))
    (cache,) = spec.caches
    assert (cache.kind, cache.layers, cache.index_dim) == ("qsa", (1, 3), 32)
    assert spec.delta is not None
    assert spec.delta.gate == "sigmoid"


def test_ratio_0_is_dense_attention(mini: Open) -> None:
    spec = changed(mini("qwen4exp"), {"attention.compress_ratios": np.array([0, 0, 0, 4])})
    assert [(need.kind, need.layers) for need in spec.caches] == [("full", (1,)), ("qsa", (3,))]


def test_ratios_that_a_converter_forgot(mini: Open) -> None:
    """The cause is named, and an option gives what the file should say."""
    right = spec_of(mini("qwen4exp"))
    zeros = {"attention.compress_ratios": np.zeros(4, np.int32)}
    spec = changed(mini("qwen4exp"), zeros)
    [warning] = spec.warnings
    assert "compress_ratios are all 0, although the file has indexers" in warning
    assert "--compress-ratio 4" in warning
    assert [need.kind for need in spec.caches] == ["full"]
    assert as_chosen(spec, {"compress_ratio": "4"}) == right
    with pytest.raises(SpecError, match="--compress-ratio 3: expected 1, 2, 4, 8 or 16"):
        as_chosen(spec, {"compress_ratio": "3"})
    names = "q_proj", "k_proj", "q_norm", "k_norm"
    missing = tuple(f"blk.{layer}.indexer.{name}.weight" for layer in (1, 3) for name in names)
    spec = changed(mini("qwen4exp"), zeros, missing)
    assert spec.warnings == ()  # a model without indexers
    with pytest.raises(SpecError, match="no layer with an indexer"):
        as_chosen(spec, {"compress_ratio": "4"})


def test_coarse_mixes_are_named(mini: Open) -> None:
    gguf = mini("qwen4exp")
    names = [name for name in gguf.tensors if "_inject." in name]
    assert len(names) == 8
    for name in names[:5]:
        tensor = gguf.tensors[name]
        small = dataclasses.replace(tensor, type_name="Q4_0", nbytes=tensor.nbytes * 9 // 32)
        gguf.tensors = {**gguf.tensors, name: small}
    [warning] = changed(gguf, {}).warnings
    assert warning.startswith("5 tensors that mix residual streams have fewer bits than Q8_0")
    assert f"{', '.join(names[:3])} ..." in warning


def test_hashes_that_a_file_leaves_out_are_computed(mini: Open) -> None:
    """Those of the real model."""
    assert _multipliers(248320, 3) == (23703573157769, 20109073645365, 8052911324071)
    ends = (3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171)
    moduli = _primes_from(20_000_000, 16)
    assert moduli == [20_000_000 + end for end in ends]
    assert sum(moduli) == 320_001_446
    absent = dict.fromkeys(f"ple.{name}" for name in HASHES)
    message = "ple.head_vocab_sizes lead to row .* of 672"
    with pytest.raises(SpecError, match=message):  # the mini model's table is smaller
        changed(mini("qwen4exp"), absent)


def test_blocks_that_predict_next_tokens_are_unused(mini: Open) -> None:
    spec = spec_of(mini("qwen35-mtp"))
    assert (spec.layers, spec.unused_layers) == (3, (3,))
    assert spec.warnings == spec.unknown_tensors == ()
    assert spec.delta is not None
    assert spec.delta.layers == (0, 1)


@pytest.mark.parametrize("name", LARGE_NAMES)
def test_large_goldens(name: str) -> None:
    path = LARGE / f"{name}.gguf"
    if not path.is_file():
        pytest.skip("the large golden set is not here")
    with Gguf.open(path) as gguf:
        assert spec_of(gguf).architecture == gguf.architecture


@pytest.mark.parametrize(
    ("name", "keys", "missing", "message"),
    [
        ("qwen35", {"ssm.state_size": None}, (), "'qwen35.ssm.state_size'.* is missing"),
        ("qwen35", {"ssm.inner_size": 64}, (), "inner_size is 64, expected 6 heads of 32"),
        ("qwen35", {"ssm.group_count": 4}, (), "time_step_rank is 6, expected a multiple of 4"),
        ("qwen35", {"rope.dimension_sections": None}, (), "dimension_sections'.* is missing"),
        ("qwen35", {}, ("blk.0.ssm_a",), r"'blk.0.ssm_a' is missing, expected shape \(6,\)"),
        ("qwen35", {"attention.recurrent_layers": np.array([True])}, (), "1 entries for 5 layers"),
        ("qwen35-mtp", {"nextn_predict_layers": 4}, (), "nextn_predict_layers is 4 of 4 blocks"),
        ("qwen3moe", {"expert_used_count": 11}, (), "expert_used_count is 11 of 10 experts"),
        ("qwen3moe", {"expert_count": 9}, (), r"has shape \(10, 64\), expected \(9, 64\)"),
        ("qwen3moe", {}, ("blk.1.ffn_up_exps.weight",), "'blk.1.ffn_up_exps.weight' is missing"),
        ("qwen4exp", {"ple.layers": np.array([1, 2])}, (), r"ple.layers is \[1, 2\], expected one"),
        ("qwen4exp", {"attention.compress_ratios": np.array([0, 4, 0, 8])}, (), r"\[4, 8\]"),
        ("qwen4exp", {}, ("blk.1.indexer.q_proj.weight",), "indexer.q_proj.weight' is missing"),
        ("qwen4exp", {}, ("per_layer_token_embd.weight",), "'per_layer_token_embd.weight' is miss"),
    ],
)
def test_refused(
    mini: Open, name: str, keys: dict[str, Any], missing: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        changed(mini(name), keys, missing)
    assert isinstance(caught.value, SpecError) or "metadata key" in str(caught.value)
    assert "\n" not in str(caught.value)
