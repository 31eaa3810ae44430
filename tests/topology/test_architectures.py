"""Specs of files: what each architecture reads of its keys, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as independent
import numpy as np
import pytest
from voltapile.shm.gguf import Gguf
from voltapile.topology.architectures import spec_of
from voltapile.topology.spec import CacheNeed, Rope, Spec, SpecError, inv_freq

TESTS = Path(__file__).parents[1]
MINI = TESTS / "data" / "golden-mini"
LARGE = TESTS.parents[1] / "shared" / "golden"

KEYS: dict[str, Any] = {
    "context_length": 128,
    "embedding_length": 32,
    "block_count": 2,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (40, 32),
    "output_norm.weight": (32,),
    **{
        f"blk.{layer}.{name}.weight": shape
        for layer in range(2)
        for name, shape in {
            "attn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32),
            "attn_output": (32, 32), "ffn_norm": (32,), "ffn_gate": (64, 32), "ffn_up": (64, 32),
            "ffn_down": (32, 64),
        }.items()
    },
}  # fmt: skip

HEAD_NORMS: dict[str, tuple[int, ...]] = {
    f"blk.{layer}.attn_{name}_norm.weight": (8,) for layer in range(2) for name in "qk"
}
POST_NORMS: dict[str, tuple[int, ...]] = {
    f"blk.{layer}.{name}.weight": (32,)
    for layer in range(2)
    for name in ("post_attention_norm", "post_ffw_norm")
}
BIASES: dict[str, tuple[int, ...]] = {
    f"blk.{layer}.attn_{name}.bias": (rows,)
    for layer in range(2)
    for name, rows in (("q", 32), ("k", 16), ("v", 16))
}
OWN: dict[str, dict[str, tuple[int, ...]]] = {
    "llama": {}, "qwen2": BIASES, "qwen3": HEAD_NORMS, "gemma3": HEAD_NORMS | POST_NORMS,
}  # fmt: skip

Make = Callable[..., Spec]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """make(keys, shapes) -> Spec of a small model with these changes; None takes one away."""

    def make(
        keys: dict[str, Any] | None = None,
        shapes: dict[str, tuple[int, ...] | None] | None = None,
        architecture: str = "llama",
    ) -> Spec:
        writer = independent.GGUFWriter(tmp_path / "m.gguf", architecture)
        for key, value in (KEYS | (keys or {})).items():
            full = key if "." in key and key.startswith("tok") else f"{architecture}.{key}"
            if isinstance(value, bool | str | list):
                add: dict[type, Callable[[str, Any], None]] = {
                    bool: writer.add_bool, str: writer.add_string, list: writer.add_array,
                }  # fmt: skip
                add[type(value)](full, value)
            elif value is not None:
                (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(full, value)
        for name, shape in (SHAPES | OWN.get(architecture, {}) | (shapes or {})).items():
            if shape:
                writer.add_tensor(name, np.ones(shape, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with Gguf.open(tmp_path / "m.gguf") as gguf:
            return spec_of(gguf)

    return make


def test_golden_mini() -> None:
    with Gguf.open(MINI / "llama" / "model-f16.gguf") as gguf:
        spec = spec_of(gguf)
    rope = Rope(
        layout="norm", dims=32, base=5e5, original_context=4096, factors_tensor="rope_freqs.weight"
    )
    cache = CacheNeed(kind="full", layers=(0, 1, 2, 3), kv_heads=2, key_dim=32, value_dim=32)
    assert spec == Spec(
        architecture="llama", name="Mini Llama", context=4096, layers=4, width=96, vocab=670,
        heads=6, kv_heads=2, key_dim=32, value_dim=32, ffn=160, eps=spec.eps, rope=rope, tied=True,
        attention_scale=32**-0.5, caches=(cache,),
    )  # fmt: skip
    assert spec.eps == pytest.approx(1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "llama-tied/model-f32",
        "llama-tied/model-Q4_K_M",
        "llama-untied/model-Q8_0",
        "qwen2/model-Q8_0",
        "qwen3/model-Q4_K_M",
        "gemma3/model-Q8_0",
    ],
)
def test_large_goldens(name: str) -> None:
    path = LARGE / f"{name}.gguf"
    if not path.is_file():
        pytest.skip("the large golden set is not here")
    with Gguf.open(path) as gguf:
        spec = spec_of(gguf)
    assert spec.architecture in name
    assert spec.tied == (spec.architecture != "qwen3" and "untied" not in name)


def test_defaults(make: Make) -> None:
    spec = make({"attention.head_count_kv": None}, {
        f"blk.{layer}.attn_{name}.weight": (32, 32) for layer in range(2) for name in "kv"
    })  # fmt: skip
    assert (spec.heads, spec.kv_heads, spec.key_dim, spec.value_dim) == (4, 4, 8, 8)
    assert spec.rope == Rope(layout="norm", dims=8, base=10000.0, original_context=128)
    assert spec.name == "m"


def test_untied_biases_fused_and_arrays(make: Make) -> None:
    assert not make(shapes={"output.weight": (40, 32), "output.bias": (40,)}).tied
    make(shapes={"blk.0.attn_q.bias": (32,), "blk.1.ffn_down.bias": (32,)})
    fused = {f"blk.1.attn_{name}.weight": None for name in "qkv"}
    make(shapes=fused | {"blk.1.attn_qkv.weight": (64, 32), "blk.1.attn_qkv.bias": (64,)})
    spec = make({"feed_forward_length": [64, 64], "attention.head_count_kv": [2, 2]})
    assert (spec.ffn, spec.kv_heads) == (64, 2)


def test_heads_wider_than_the_model(make: Make) -> None:
    shapes = {
        f"blk.{layer}.{name}.weight": shape
        for layer in range(2)
        for name, shape in {
            "attn_q": (64, 32), "attn_k": (32, 32), "attn_v": (20, 32), "attn_output": (32, 40),
        }.items()
    }  # fmt: skip
    spec = make({"attention.key_length": 16, "attention.value_length": 10}, shapes)
    assert (spec.key_dim, spec.value_dim, spec.rope.dims) == (16, 10, 16)


@pytest.mark.parametrize(
    ("keys", "shapes", "message"),
    [
        ({"context_length": None}, {}, r"'llama.context_length' is missing"),
        ({"block_count": 3}, {}, r"'blk.2.attn_norm.weight' is missing, expected shape \(32,\)"),
        ({"block_count": 2**31 - 1}, {}, "block_count is 2147483647, expected at most 1024"),
        ({"block_count": 0}, {}, "block_count is 0, expected 1"),
        ({"block_count": "two"}, {}, "'llama.block_count' is str 'two', expected int"),
        ({"expert_count": 8}, {}, "expert_count is 8: experts are not supported yet"),
        ({"attention.head_count_kv": 3}, {}, "head_count is 4, expected a multiple of 3 KV heads"),
        ({"feed_forward_length": [64, 32]}, {}, r"differs between layers \(32 to 64\)"),
        ({"attention.layer_norm_rms_epsilon": math.nan}, {}, "epsilon is nan, expected a finite"),
        ({"rope.dimension_count": 7}, {}, "dimension_count is 7, expected an even number up to 8"),
        ({"rope.dimension_count": 16}, {}, "dimension_count is 16, expected an even number up to"),
        ({"rope.scaling.type": "longrope"}, {}, "'longrope'; supported: none, linear, yarn"),
        ({"rope.freq_base": 0.5}, {}, "freq_base is 0.5, expected more than 1"),
        ({}, {"token_embd.weight": None}, "tensor 'token_embd.weight' is missing"),
        ({}, {"blk.1.ffn_up.weight": None}, r"'blk.1.ffn_up.weight' is missing, expected shape"),
        ({}, {"blk.0.attn_k.weight": (32, 32)}, r"has shape \(32, 32\), expected \(16, 32\)"),
        ({}, {"blk.0.attn_k.bias": (8,)}, r"'blk.0.attn_k.bias' has shape \(8,\), expected"),
        ({}, {"rope_freqs.weight": (8,)}, r"'rope_freqs.weight' has shape \(8,\), expected \(4,\)"),
        ({}, dict.fromkeys(SHAPES), "found only a vocabulary"),
        ({"tokenizer.ggml.tokens": ["x"] * 41}, {}, "found 41 tokens, but token_embd.weight has"),
    ],
)
def test_refused(make: Make, keys: dict[str, Any], shapes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make(keys, shapes)
    assert "\n" not in str(caught.value)


def test_unknown_architecture(make: Make) -> None:
    with pytest.raises(
        SpecError, match=r"m.gguf: found architecture 'bert'; supported: gemma3, llama, q"
    ):
        make(architecture="bert")


def test_scaling_keys(make: Make) -> None:
    assert make({"rope.scale_linear": 2.0}).rope.scaling == "linear"
    assert make({"rope.scaling.factor": 1.0, "rope.scaling.type": "yarn"}).rope.scaling == "none"
    found = make({
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.freq_base": 5e5,
        "rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 0.9,
    }).rope  # fmt: skip
    assert (found.scaling, found.factor, found.base) == ("yarn", 4.0, 5e5)
    assert found.original_context == 32
    assert found.attn_factor == pytest.approx(0.9)
    none = make({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}).rope
    assert inv_freq(none)[0].tolist() == inv_freq(make().rope)[0].tolist()


# --- qwen2, qwen3, gemma3 ----------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen(make: Make, architecture: str) -> None:
    spec = make({"attention.key_length": 8}, architecture=architecture)
    assert spec.architecture == architecture
    assert spec.rope.layout == "neox"
    assert spec.attention_scale == 8**-0.5
    assert [need.kind for need in spec.caches] == ["full"]
    for name, shape in OWN[architecture].items():
        with pytest.raises(SpecError, match=f"'{name}' is missing, expected shape"):
            make({}, {name: None}, architecture)
        if architecture == "qwen3":
            found = make({}, {name: shape})
            assert found.unknown_tensors == (name,)
            [warning] = found.warnings
            assert warning.endswith(f"no part of a llama model here and are not used: {name}")


def test_qwen2_fused(make: Make) -> None:
    fused: dict[str, Any] = {f"blk.1.attn_{name}.weight": None for name in "qkv"}
    fused |= {f"blk.1.attn_{name}.bias": None for name in "qkv"}
    fused["blk.1.attn_qkv.weight"] = (64, 32)
    make({}, fused | {"blk.1.attn_qkv.bias": (64,)}, "qwen2")
    with pytest.raises(SpecError, match=r"'blk.1.attn_qkv.bias' is missing"):
        make({}, fused, "qwen2")


def gemma(
    make: Make, layers: int = 2, other: dict[str, tuple[int, ...]] | None = None, **keys: Any
) -> Spec:
    """A gemma3 of so many layers; __ in a key stands for a dot."""
    shapes = {
        name.replace("blk.0", f"blk.{layer}"): shape
        for layer in range(2, layers)
        for name, shape in (SHAPES | OWN["gemma3"]).items()
        if name.startswith("blk.0")
    }
    found = {key.replace("__", "."): value for key, value in keys.items()}
    found = {"block_count": layers, "attention.key_length": 8, **found}
    return make(found, shapes | (other or {}), "gemma3")


def test_gemma3(make: Make) -> None:
    spec = gemma(
        make, 7, attention__sliding_window=16, rope__freq_base=1e6, rope__scaling__factor=8.0,
        rope__freq_base_swa=2e4,
    )  # fmt: skip
    assert [(need.kind, need.layers, need.window) for need in spec.caches] == [
        ("full", (5,), 0),
        ("window", (0, 1, 2, 3, 4, 6), 16),
    ]
    assert (spec.rope.base, spec.rope.scaling, spec.rope.factor) == (1e6, "linear", 8.0)
    assert spec.rope_window == Rope(layout="neox", dims=8, base=2e4)
    assert (spec.attention_scale, spec.embedding_scale) == (8**-0.5, 32**0.5)
    assert (spec.logit_softcap, spec.tied) == (0.0, True)


def test_gemma3_patterns(make: Make) -> None:
    def sliding(pattern: Any, window: int = 16) -> list[int]:
        spec = gemma(
            make, 5, attention__sliding_window=window,
            attention__sliding_window_pattern=pattern, final_logit_softcapping=30.0,
        )  # fmt: skip
        assert spec.logit_softcap == 30.0
        assert sorted(i for need in spec.caches for i in need.layers) == [*range(5)]
        return [i for i in range(5) if spec.cache_of(i).window]

    assert sliding(2) == [0, 2, 4]
    assert sliding(1) == []
    assert sliding(0) == [0, 1, 2, 3, 4]
    assert sliding([True, False, False, True, True]) == [0, 3, 4]
    assert sliding(None) == [0, 1, 2, 3, 4]  # every sixth sees all
    assert sliding(None, window=0) == []
    assert sliding([1, 1, 0, 0, 0]) == [0, 1]
    with pytest.raises(SpecError, match="pattern has 4 entries, expected 5"):
        sliding([True, False, False, True])


def test_gemma3_27b_scales_by_width(make: Make) -> None:
    wide = {
        f"blk.{layer}.{name}.weight": shape
        for layer in range(62)
        for name, shape in {
            "attn_q": (64, 32), "attn_k": (32, 32), "attn_v": (32, 32), "attn_output": (32, 64),
            "attn_q_norm": (16,), "attn_k_norm": (16,),
        }.items()
    }  # fmt: skip
    spec = gemma(make, 62, wide, attention__key_length=16, attention__value_length=16)
    assert spec.key_dim == 16
    assert spec.attention_scale == (32 / 4) ** -0.5


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention__sliding_window": "w"}, "sliding_window' is str 'w', expected int"),
        ({"rope__freq_base_swa": 1.0}, "freq_base_swa is 1.0, expected more than 1"),
        (
            {"attention__sliding_window": 4, "attention__sliding_window_pattern": "odd"},
            "'gemma3.attention.sliding_window_pattern' is str 'odd', expected int",
        ),
    ],
)
def test_gemma3_refused(make: Make, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gemma(make, **keys)
