"""What a model is, read once from its metadata; one small function per architecture.

Knows nothing of tensors' bytes, devices or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
from voltapile.shm.gguf import REQUIRED, Gguf

MAX_LAYERS = 1024  # far above any model; keeps a damaged count from costing memory


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """How positions turn a head's first `dims` dimensions (../shared models.md section 2)."""

    layout: str  # "norm": pairs (2i, 2i+1); "neox": pairs (i, i + dims/2)
    dims: int
    base: float
    scaling: str = "none"  # none | linear | yarn
    factor: float = 1.0
    original_context: int = 0
    attn_factor: float = 1.0
    factors_tensor: str = ""  # llama-3: divide the frequencies by this tensor


class CacheNeed(msgspec.Struct, frozen=True, kw_only=True):
    """One cache group: layers whose pages age together. kind: "full" or "window"."""

    kind: str
    layers: tuple[int, ...]
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One model. Names: D width, H heads, F ffn, V vocab rows, L layers."""

    architecture: str
    name: str
    context: int  # trained context
    layers: int
    width: int
    vocab: int  # rows of token_embd
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    ffn: int
    eps: float
    rope: Rope
    tied: bool
    caches: tuple[CacheNeed, ...]


class SpecError(ValueError):
    """A model that this version cannot run: what was found and what is supported."""


def spec_of(gguf: Gguf) -> Spec:
    """The Spec of an open file, its tensors' names and shapes checked. Raises SpecError."""
    found = gguf.architecture
    read = ARCHITECTURES.get(found)
    if read is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise SpecError(f"{gguf.path}: found architecture {found!r}; supported: {known}")
    if not gguf.tensors:
        raise SpecError(f"{gguf.path}: found only a vocabulary, expected a {found} model's tensors")
    spec, tensors = read(_Keys(gguf, found))
    _check_tensors(gguf, tensors)
    num_tokens = len(gguf.get("tokenizer.ggml.tokens", [], list))
    if num_tokens > spec.vocab:
        raise SpecError(
            f"{gguf.path}: found {num_tokens} tokens, but token_embd.weight has {spec.vocab} rows"
        )
    return spec


def inv_freq(rope: Rope, factors: np.ndarray | None = None) -> tuple[np.ndarray, float]:
    """(float32[dims / 2], scale): the angle that one position adds to each pair, and what cosine
    and sine are multiplied by. factors: llama-3's tensor. Computed in float64, rounded once."""
    pairs = np.arange(rope.dims // 2, dtype=np.float64)
    theta = rope.base ** (-2.0 * pairs / rope.dims)
    scale = rope.attn_factor
    if rope.scaling == "linear":
        theta = theta / rope.factor
    elif rope.scaling == "yarn":

        def corner(turns: float) -> float:  # the pair that turns so often in the original context
            ratio = rope.original_context / (2 * math.pi * turns)
            return rope.dims * math.log(ratio) / (2 * math.log(rope.base))

        low = max(0, math.floor(corner(32.0)))
        high = min(rope.dims - 1, math.ceil(corner(1.0)))
        ramp = 1.0 - np.clip((pairs - low) / max(0.001, high - low), 0.0, 1.0)
        theta = theta * ramp + theta / rope.factor * (1.0 - ramp)
        scale *= 1.0 + 0.1 * math.log(max(1.0, rope.factor))
    if factors is not None:
        theta = theta / factors.astype(np.float64)
    return theta.astype(np.float32), scale


class _Keys:
    """Metadata below `{architecture}.`, with the checks that every architecture needs."""

    def __init__(self, gguf: Gguf, architecture: str) -> None:
        self.gguf = gguf
        self.architecture = architecture

    def fail(self, key: str, message: str) -> NoReturn:
        raise SpecError(f"{self.gguf.path}: {self.architecture}.{key} {message}")

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.gguf.metadata

    def count(self, key: str, default: Any = REQUIRED, minimum: int = 1) -> int:
        """An integer; an array of one value for each layer serves where all are equal."""
        full = f"{self.architecture}.{key}"
        value = self.gguf.get(full, default)
        if isinstance(value, np.ndarray) and value.size:
            if (value != value[0]).any():
                self.fail(
                    key,
                    f"differs between layers ({value.min()} to {value.max()}), "
                    "which is not supported yet",
                )
            value = value[0].item()
        if type(value) is not int:
            value = self.gguf.get(full, default, int)
        if not minimum <= value < 2**31:
            self.fail(key, f"is {value}, expected {minimum} to 2^31 - 1")
        return int(value)

    def number(self, key: str, default: Any = REQUIRED) -> float:
        """A finite number that is not negative."""
        value = self.gguf.get(f"{self.architecture}.{key}", default, float)
        if not (math.isfinite(value) and value >= 0):
            self.fail(key, f"is {value}, expected a finite number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        return str(self.gguf.get(f"{self.architecture}.{key}", default, str))


def _rope(keys: _Keys, layout: str, dims: int, key_dim: int, context: int) -> Rope:
    """The rope of an architecture without kinds of its own."""
    if dims % 2 or dims > key_dim:
        keys.fail("rope.dimension_count", f"is {dims}, expected an even number up to {key_dim}")
    base = keys.number("rope.freq_base", 10000.0)
    if base <= 1:
        keys.fail("rope.freq_base", f"is {base}, expected more than 1")
    scaling = keys.text("rope.scaling.type", "linear")
    if scaling not in ("none", "linear", "yarn"):
        keys.fail("rope.scaling.type", f"is {scaling!r}; supported: none, linear, yarn")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0)) or 1.0
    if factor == 1.0:
        scaling = "none"
    has_factors = "rope_freqs.weight" in keys.gguf.tensors
    return Rope(
        layout=layout,
        dims=dims,
        base=base,
        scaling=scaling,
        factor=factor,
        original_context=keys.count("rope.scaling.original_context_length", context),
        attn_factor=keys.number("rope.scaling.attn_factor", 1.0),
        factors_tensor="rope_freqs.weight" if has_factors else "",
    )


Shapes = dict[str, tuple[tuple[int, ...], bool]]  # name -> (shape, is required)


def _llama(keys: _Keys) -> tuple[Spec, Shapes]:
    """models.md section 4: pre-norm decoder, grouped-query attention, SwiGLU."""
    gguf = keys.gguf
    if experts := keys.count("expert_count", 0, minimum=0):
        keys.fail("expert_count", f"is {experts}: experts are not supported yet")
    width, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    kv_heads = keys.count("attention.head_count_kv", heads)
    if heads % kv_heads:
        keys.fail("attention.head_count", f"is {heads}, expected a multiple of {kv_heads} KV heads")
    key_dim = keys.count("attention.key_length", width // heads)
    value_dim = keys.count("attention.value_length", width // heads)
    context, layers = keys.count("context_length"), keys.count("block_count")
    if layers > MAX_LAYERS:
        keys.fail("block_count", f"is {layers}, expected at most {MAX_LAYERS}")
    eps = keys.number("attention.layer_norm_rms_epsilon")
    spec = Spec(
        architecture="llama",
        name=str(gguf.get("general.name", Path(gguf.path).stem, str)),
        context=context,
        layers=layers,
        width=width,
        vocab=_rows(gguf, "token_embd.weight"),
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        ffn=keys.count("feed_forward_length"),
        eps=eps,
        rope=_rope(keys, "norm", keys.count("rope.dimension_count", key_dim), key_dim, context),
        tied="output.weight" not in gguf.tensors,
        caches=(
            CacheNeed(
                kind="full",
                layers=tuple(range(layers)),
                kv_heads=kv_heads,
                key_dim=key_dim,
                value_dim=value_dim,
            ),
        ),
    )
    return spec, _llama_tensors(spec, gguf)


def _llama_tensors(spec: Spec, gguf: Gguf) -> Shapes:
    q_rows, k_rows = spec.heads * spec.key_dim, spec.kv_heads * spec.key_dim
    v_rows, o_columns = spec.kv_heads * spec.value_dim, spec.heads * spec.value_dim
    split = {
        "attn_q": (q_rows, spec.width),
        "attn_k": (k_rows, spec.width),
        "attn_v": (v_rows, spec.width),
    }
    fused = {"attn_qkv": (q_rows + k_rows + v_rows, spec.width)}
    matrices = {
        "attn_output": (spec.width, o_columns),
        "ffn_gate": (spec.ffn, spec.width),
        "ffn_up": (spec.ffn, spec.width),
        "ffn_down": (spec.width, spec.ffn),
    }
    shapes: Shapes = {
        "token_embd.weight": ((spec.vocab, spec.width), True),
        "output_norm.weight": ((spec.width,), True),
        "output.weight": ((spec.vocab, spec.width), not spec.tied),
        "output.bias": ((spec.vocab,), False),
        "rope_freqs.weight": ((spec.rope.dims // 2,), False),
    }
    for layer in range(spec.layers):
        is_fused = f"blk.{layer}.attn_qkv.weight" in gguf.tensors
        for norm in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{layer}.{norm}.weight"] = (spec.width,), True
        attention = fused if is_fused else split
        for name, shape in (attention | matrices).items():
            shapes[f"blk.{layer}.{name}.weight"] = shape, True
            shapes[f"blk.{layer}.{name}.bias"] = shape[:1], False
    return shapes


def _rows(gguf: Gguf, name: str) -> int:
    tensor = gguf.tensors.get(name)
    if tensor is None:
        raise SpecError(f"{gguf.path}: tensor {name!r} is missing")
    return tensor.shape[0]


def _check_tensors(gguf: Gguf, shapes: Shapes) -> None:
    """Every needed tensor is there, every shape is right, and nothing is left unused."""
    for name, (shape, is_required) in shapes.items():
        tensor = gguf.tensors.get(name)
        if tensor is None and is_required:
            raise SpecError(f"{gguf.path}: tensor {name!r} is missing, expected shape {shape}")
        if tensor is not None and tensor.shape != shape:
            raise SpecError(
                f"{gguf.path}: tensor {name!r} has shape {tensor.shape}, expected {shape}"
            )
    for name in gguf.tensors:
        # A tensor that nobody reads would mean wrong answers without a word.
        if name not in shapes:
            raise SpecError(
                f"{gguf.path}: tensor {name!r} is no part of a {gguf.architecture} model here"
            )


ARCHITECTURES: dict[str, Callable[[_Keys], tuple[Spec, Shapes]]] = {"llama": _llama}
