"""From an open file to its Spec: one small function for each architecture.

Each reads the keys that its family has and says which tensors belong to such a model; what is
missing or misshapen is a SpecError, what is left over a warning.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from voltapile.shm.gguf import Gguf
from voltapile.topology import hybrids
from voltapile.topology.dense import Shapes, base, cache, decoder, tensors
from voltapile.topology.keys import Keys
from voltapile.topology.spec import Rope, Spec, SpecError

LAYERS_OF_27B = 62  # what tells gemma3's largest model from the others


def spec_of(gguf: Gguf) -> Spec:
    """The Spec of an open file, its tensors' names and shapes checked. Raises SpecError."""
    found = gguf.architecture
    read = ARCHITECTURES.get(found)
    if read is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise SpecError(f"{gguf.path}: found architecture {found!r}; supported: {known}")
    if not gguf.tensors:
        raise SpecError(f"{gguf.path}: found only a vocabulary, expected a {found} model's tensors")
    spec, shapes = read(Keys(gguf, found))
    _check_tensors(gguf, shapes)
    spec = _with_unknown(gguf, shapes, spec)
    num_tokens = len(gguf.get("tokenizer.ggml.tokens", [], list))
    if num_tokens > spec.vocab:
        raise SpecError(
            f"{gguf.path}: found {num_tokens} tokens, but token_embd.weight has {spec.vocab} rows"
        )
    return spec


# --- architectures (models.md sections 4 and 5) ---------------------------------------------------


def _llama(keys: Keys) -> tuple[Spec, Shapes]:
    """Pre-norm decoder, grouped-query attention, SwiGLU; rope in neighbouring pairs."""
    spec = decoder(keys, "norm")
    shapes = tensors(spec, keys.gguf)
    shapes["rope_freqs.weight"] = (spec.rope.dims // 2,), False
    return spec, shapes


def _qwen2(keys: Keys) -> tuple[Spec, Shapes]:
    """As llama, with biases on q, k and v; rope in half-split pairs."""
    spec = decoder(keys, "neox")
    shapes = tensors(spec, keys.gguf)
    for name, (shape, _) in shapes.items():
        if name.endswith(("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_qkv.bias")):
            shapes[name] = shape, True
    return spec, shapes


def _qwen3(keys: Keys) -> tuple[Spec, Shapes]:
    """As llama, with norms over each head of q and k; rope in half-split pairs."""
    spec = decoder(keys, "neox")
    return spec, tensors(spec, keys.gguf, head_norms=("attn_q_norm", "attn_k_norm"))


def _gemma3(keys: Keys) -> tuple[Spec, Shapes]:
    """Most layers see a window, with a rope of their own; four norms a layer, GeGLU."""
    spec = decoder(keys, "neox")
    window = keys.count("attention.sliding_window", 0, minimum=0)
    slides = keys.pattern("attention.sliding_window_pattern", 6, spec.layers) if window else ()
    full = [i for i in range(spec.layers) if not (slides and slides[i])]
    sliding = [i for i in range(spec.layers) if i not in full]
    per_head = spec.width / spec.heads if spec.layers == LAYERS_OF_27B else spec.key_dim
    spec = msgspec.structs.replace(
        spec,
        rope_window=Rope(layout="neox", dims=spec.rope.dims, base=base(keys, "rope.freq_base_swa")),
        attention_scale=per_head**-0.5,
        embedding_scale=spec.width**0.5,
        logit_softcap=keys.number("final_logit_softcapping", 0.0),
        caches=tuple(
            cache(layers, spec.kv_heads, spec.key_dim, spec.value_dim, size)
            for layers, size in ((full, 0), (sliding, window))
            if layers
        ),
    )
    norms = "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"
    return spec, tensors(spec, keys.gguf, norms, ("attn_q_norm", "attn_k_norm"))


ARCHITECTURES: dict[str, Callable[[Keys], tuple[Spec, Shapes]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "qwen3moe": hybrids.qwen3moe,
    "qwen3next": hybrids.qwen3next,
    "qwen35": hybrids.qwen35,
    "qwen35moe": hybrids.qwen35,
    "qwen4exp": hybrids.qwen4exp,
}


def _check_tensors(gguf: Gguf, shapes: Shapes) -> None:
    """Every needed tensor is there, and every shape is right."""
    for name, (shape, is_required) in shapes.items():
        tensor = gguf.tensors.get(name)
        if tensor is None and is_required:
            raise SpecError(f"{gguf.path}: tensor {name!r} is missing, expected shape {shape}")
        if tensor is not None and tensor.shape != shape:
            raise SpecError(
                f"{gguf.path}: tensor {name!r} has shape {tensor.shape}, expected {shape}"
            )


def _with_unknown(gguf: Gguf, shapes: Shapes, spec: Spec) -> Spec:
    """One warning of tensors that nobody reads: answers may be wrong without them."""
    unused = tuple(f"blk.{layer}." for layer in spec.unused_layers)
    known = shapes.keys() | _factors(gguf)
    unknown = tuple(
        name for name in gguf.tensors if name not in known and not name.startswith(unused)
    )
    if not unknown:
        return spec
    named = ", ".join(unknown[:3]) + (" ..." if len(unknown) > 3 else "")
    warning = (
        f"{len(unknown)} tensor(s) of the file are no part of a {gguf.architecture} model here and "
        f"are not used: {named}"
    )
    warnings = (*spec.warnings, warning)
    return msgspec.structs.replace(spec, unknown_tensors=unknown, warnings=warnings)


def _factors(gguf: Gguf) -> set[str]:
    """Tensors that NVFP4 files have beside a weight: of its values, and of the activations that
    somebody else may want to round."""
    stems = [
        name.removesuffix(".weight")
        for name, tensor in gguf.tensors.items()
        if tensor.type_name == "NVFP4"
    ]
    return {f"{stem}.{kind}" for stem in stems for kind in ("scale", "input_scale")}
