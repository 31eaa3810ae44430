"""From an open file to its Spec: one small function for each architecture.

Each reads the keys that its family has and says which tensors belong to such a model; what is
missing, misshapen or left over is a SpecError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from voltapile.shm.gguf import Gguf
from voltapile.topology.keys import Keys
from voltapile.topology.spec import CacheNeed, Rope, Spec, SpecError

MAX_LAYERS = 1024  # far above any model; keeps a damaged count from costing memory
LAYERS_OF_27B = 62  # what tells gemma3's largest model from the others

Shapes = dict[str, tuple[tuple[int, ...], bool]]  # name -> (shape, is required)


def spec_of(gguf: Gguf) -> Spec:
    """The Spec of an open file, its tensors' names and shapes checked. Raises SpecError."""
    found = gguf.architecture
    read = ARCHITECTURES.get(found)
    if read is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise SpecError(f"{gguf.path}: found architecture {found!r}; supported: {known}")
    if not gguf.tensors:
        raise SpecError(f"{gguf.path}: found only a vocabulary, expected a {found} model's tensors")
    spec, tensors = read(Keys(gguf, found))
    _check_tensors(gguf, tensors)
    num_tokens = len(gguf.get("tokenizer.ggml.tokens", [], list))
    if num_tokens > spec.vocab:
        raise SpecError(
            f"{gguf.path}: found {num_tokens} tokens, but token_embd.weight has {spec.vocab} rows"
        )
    return spec


# --- architectures (models.md sections 4 and 5) ---------------------------------------------------


def _llama(keys: Keys) -> tuple[Spec, Shapes]:
    """Pre-norm decoder, grouped-query attention, SwiGLU; rope in neighbouring pairs."""
    spec = _dense(keys, "norm")
    shapes = _tensors(spec, keys.gguf)
    shapes["rope_freqs.weight"] = (spec.rope.dims // 2,), False
    return spec, shapes


def _qwen2(keys: Keys) -> tuple[Spec, Shapes]:
    """As llama, with biases on q, k and v; rope in half-split pairs."""
    spec = _dense(keys, "neox")
    shapes = _tensors(spec, keys.gguf)
    for name, (shape, _) in shapes.items():
        if name.endswith(("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_qkv.bias")):
            shapes[name] = shape, True
    return spec, shapes


def _qwen3(keys: Keys) -> tuple[Spec, Shapes]:
    """As llama, with norms over each head of q and k; rope in half-split pairs."""
    spec = _dense(keys, "neox")
    return spec, _tensors(spec, keys.gguf, head_norms=("attn_q_norm", "attn_k_norm"))


def _gemma3(keys: Keys) -> tuple[Spec, Shapes]:
    """Most layers see a window, with a rope of their own; four norms a layer, GeGLU."""
    spec = _dense(keys, "neox")
    window = keys.count("attention.sliding_window", 0, minimum=0)
    slides = keys.pattern("attention.sliding_window_pattern", 6, spec.layers) if window else ()
    full = [i for i in range(spec.layers) if not (slides and slides[i])]
    sliding = [i for i in range(spec.layers) if i not in full]
    per_head = spec.width / spec.heads if spec.layers == LAYERS_OF_27B else spec.key_dim
    spec = msgspec.structs.replace(
        spec,
        rope_window=Rope(
            layout="neox", dims=spec.rope.dims, base=_base(keys, "rope.freq_base_swa")
        ),
        attention_scale=per_head**-0.5,
        embedding_scale=spec.width**0.5,
        logit_softcap=keys.number("final_logit_softcapping", 0.0),
        caches=tuple(
            _cache(spec, layers, size) for layers, size in ((full, 0), (sliding, window)) if layers
        ),
    )
    norms = "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"
    return spec, _tensors(spec, keys.gguf, norms, ("attn_q_norm", "attn_k_norm"))


ARCHITECTURES: dict[str, Callable[[Keys], tuple[Spec, Shapes]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
}


# --- what they share ------------------------------------------------------------------------------


def _dense(keys: Keys, layout: str) -> Spec:
    """A decoder without experts, all layers alike, every position seen."""
    gguf = keys.gguf
    if experts := keys.count("expert_count", 0, minimum=0):
        keys.fail("expert_count", f"is {experts}: experts are not supported yet")
    width, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    kv_heads = keys.count("attention.head_count_kv", heads)
    if heads % kv_heads:
        keys.fail("attention.head_count", f"is {heads}, expected a multiple of {kv_heads} KV heads")
    key_dim = keys.count("attention.key_length", width // heads)
    context, layers = keys.count("context_length"), keys.count("block_count")
    if layers > MAX_LAYERS:
        keys.fail("block_count", f"is {layers}, expected at most {MAX_LAYERS}")
    spec = Spec(
        architecture=keys.architecture,
        name=str(gguf.get("general.name", Path(gguf.path).stem, str)),
        context=context,
        layers=layers,
        width=width,
        vocab=_rows(gguf, "token_embd.weight"),
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=keys.count("attention.value_length", width // heads),
        ffn=keys.count("feed_forward_length"),
        eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(keys, layout, key_dim, context),
        attention_scale=key_dim**-0.5,
        tied="output.weight" not in gguf.tensors,
        caches=(),
    )
    return msgspec.structs.replace(spec, caches=(_cache(spec, range(layers)),))


def _cache(spec: Spec, layers: Sequence[int], window: int = 0) -> CacheNeed:
    return CacheNeed(
        kind="window" if window else "full",
        layers=tuple(layers),
        kv_heads=spec.kv_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        window=window,
    )


def _rope(keys: Keys, layout: str, key_dim: int, context: int) -> Rope:
    """The rope of layers that see all positions."""
    dims = keys.count("rope.dimension_count", key_dim)
    if dims % 2 or dims > key_dim:
        keys.fail("rope.dimension_count", f"is {dims}, expected an even number up to {key_dim}")
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
        base=_base(keys, "rope.freq_base"),
        scaling=scaling,
        factor=factor,
        original_context=keys.count("rope.scaling.original_context_length", context),
        attn_factor=keys.number("rope.scaling.attn_factor", 1.0),
        factors_tensor="rope_freqs.weight" if has_factors else "",
    )


def _base(keys: Keys, key: str) -> float:
    base = keys.number(key, 10000.0)
    if base <= 1:
        keys.fail(key, f"is {base}, expected more than 1")
    return base


def _tensors(
    spec: Spec,
    gguf: Gguf,
    norms: Sequence[str] = ("attn_norm", "ffn_norm"),
    head_norms: Sequence[str] = (),
) -> Shapes:
    """The tensors of a dense decoder; biases are optional."""
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
    vectors = dict.fromkeys(norms, spec.width) | dict.fromkeys(head_norms, spec.key_dim)
    shapes: Shapes = {
        "token_embd.weight": ((spec.vocab, spec.width), True),
        "output_norm.weight": ((spec.width,), True),
        "output.weight": ((spec.vocab, spec.width), not spec.tied),
        "output.bias": ((spec.vocab,), False),
    }
    for layer in range(spec.layers):
        is_fused = f"blk.{layer}.attn_qkv.weight" in gguf.tensors
        for name, length in vectors.items():
            shapes[f"blk.{layer}.{name}.weight"] = (length,), True
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
