"""Spec: what a llama file says of itself, what is refused, and rope frequencies."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as independent
import numpy as np
import pytest
from voltapile.shm.gguf import Gguf
from voltapile.topology.spec import CacheNeed, Rope, Spec, SpecError, inv_freq, spec_of

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

Make = Callable[..., Spec]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """make(keys, shapes) -> Spec of a small llama with these changes; None takes one away."""

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
        for name, shape in (SHAPES | (shapes or {})).items():
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
        caches=(cache,),
    )  # fmt: skip
    assert spec.eps == pytest.approx(1e-6)


@pytest.mark.parametrize(
    "name",
    ["llama-tied/model-f32", "llama-tied/model-Q4_K_M", "llama-untied/model-Q8_0"],
)
def test_large_goldens(name: str) -> None:
    path = LARGE / f"{name}.gguf"
    if not path.is_file():
        pytest.skip("the large golden set is not here")
    with Gguf.open(path) as gguf:
        assert spec_of(gguf).tied == ("untied" not in name)


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
        ({}, {"blk.0.attn_q_norm.weight": (8,)}, "'blk.0.attn_q_norm.weight' is no part of a llam"),
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
    with pytest.raises(SpecError, match=r"m.gguf: found architecture 'bert'; supported: llama"):
        make(architecture="bert")


# --- rope -------------------------------------------------------------------------------------


def rope(**changes: Any) -> Rope:
    fields: dict[str, Any] = {"layout": "norm", "dims": 8, "base": 1e4, "original_context": 64}
    return Rope(**fields | changes)


def test_rope_without_scaling() -> None:
    theta, scale = inv_freq(rope())
    assert theta.dtype == np.float32
    assert theta.tolist() == [np.float32(10 ** -(0.0 + i)) for i in range(4)]
    assert scale == 1.0


def test_rope_linear_and_factors() -> None:
    theta, scale = inv_freq(rope(scaling="linear", factor=4.0))
    assert theta == pytest.approx([0.25, 0.025, 0.0025, 0.00025])
    assert scale == 1.0
    theta, _ = inv_freq(rope(), np.array([1, 2, 4, 8], np.float32))
    assert theta == pytest.approx([1, 0.05, 0.0025, 0.000125])


def test_rope_yarn_by_hand() -> None:
    """dims 8, base 10000, 64 positions: corner(b) = 8 ln(64 / 2 pi b) / (2 ln 10000)."""
    assert 8 * math.log(64 / (2 * math.pi * 32)) / (2 * math.log(1e4)) < 0  # low = 0
    assert math.ceil(8 * math.log(64 / (2 * math.pi)) / (2 * math.log(1e4))) == 2  # high = 2
    theta, scale = inv_freq(rope(scaling="yarn", factor=4.0, attn_factor=0.5))
    # ramps 1, 1/2, 0, 0
    assert theta == pytest.approx([1.0, 0.1 * (0.5 + 0.5 / 4), 0.01 / 4, 0.001 / 4])
    assert scale == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))


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
