"""What architectures share: the Spec of a plain decoder, and the tensors of its parts.

Reads metadata through Keys; knows no architecture's name. Shapes are in numpy's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from voltapile.shm.gguf import Gguf
from voltapile.topology.keys import Keys
from voltapile.topology.spec import CacheNeed, Rope, Spec, SpecError

MAX_LAYERS = 1024  # far above any model; keeps a damaged count from costing memory

Shapes = dict[str, tuple[tuple[int, ...], bool]]  # name -> (shape, is required)


def decoder(keys: Keys, layout: str, ffn: int | None = None) -> Spec:
    """A decoder whose layers are all alike and see every position. ffn: 0 where there are experts
    instead."""
    gguf = keys.gguf
    experts = keys.count("expert_count", 0, minimum=0)
    if experts and ffn is None:
        keys.fail("expert_count", f"is {experts}: experts are not supported yet")
    width, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    kv_heads = keys.count("attention.head_count_kv", heads)
    if heads % kv_heads:
        keys.fail("attention.head_count", f"is {heads}, expected a multiple of {kv_heads} KV heads")
    key_dim = keys.count("attention.key_length", width // heads)
    value_dim = keys.count("attention.value_length", width // heads)
    context, layers, unused = keys.count("context_length"), *_layers(keys)
    return Spec(
        architecture=keys.architecture,
        name=str(gguf.get("general.name", Path(gguf.path).stem, str)),
        context=context,
        layers=layers,
        width=width,
        vocab=rows(gguf, "token_embd.weight"),
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        ffn=keys.count("feed_forward_length") if ffn is None else ffn,
        eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(keys, layout, key_dim, context),
        attention_scale=key_dim**-0.5,
        tied="output.weight" not in gguf.tensors,
        caches=(cache(range(layers), kv_heads, key_dim, value_dim),),
        unused_layers=tuple(range(layers, layers + unused)),
    )


def _layers(keys: Keys) -> tuple[int, int]:
    """Layers of the model, and those behind them that predict next tokens."""
    blocks = keys.count("block_count")
    if blocks > MAX_LAYERS:
        keys.fail("block_count", f"is {blocks}, expected at most {MAX_LAYERS}")
    unused = keys.count("nextn_predict_layers", 0, minimum=0)
    if unused >= blocks:
        keys.fail("nextn_predict_layers", f"is {unused} of {blocks} blocks")
    return blocks - unused, unused


def cache(
    layers: Sequence[int], kv_heads: int, key_dim: int, value_dim: int, window: int = 0
) -> CacheNeed:
    return CacheNeed(
        kind="window" if window else "full",
        layers=tuple(layers),
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
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
        base=base(keys, "rope.freq_base"),
        scaling=scaling,
        factor=factor,
        original_context=keys.count("rope.scaling.original_context_length", context),
        attn_factor=keys.number("rope.scaling.attn_factor", 1.0),
        factors_tensor="rope_freqs.weight" if has_factors else "",
    )


def base(keys: Keys, key: str) -> float:
    found = keys.number(key, 10000.0)
    if found <= 1:
        keys.fail(key, f"is {found}, expected more than 1")
    return found


def tensors(
    spec: Spec,
    gguf: Gguf,
    norms: Sequence[str] = ("attn_norm", "ffn_norm"),
    head_norms: Sequence[str] = (),
) -> Shapes:
    """The tensors of a dense decoder; biases are optional."""
    shapes = ends(spec)
    for layer in range(spec.layers):
        vectors = vector_shapes(spec, norms, head_norms)
        matrices = attention(spec, gguf, layer) | with_biases(dense_ffn(spec))
        shapes |= in_layer(layer, vectors | matrices)
    return shapes


def ends(spec: Spec) -> Shapes:
    """What stands before and behind the layers."""
    return {
        "token_embd.weight": ((spec.vocab, spec.width), True),
        "output_norm.weight": ((spec.width,), True),
        "output.weight": ((spec.vocab, spec.width), not spec.tied),
        "output.bias": ((spec.vocab,), False),
    }


def in_layer(layer: int, shapes: Mapping[str, tuple[tuple[int, ...], bool]]) -> Shapes:
    return {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}


def vector_shapes(spec: Spec, norms: Sequence[str], head_norms: Sequence[str] = ()) -> Shapes:
    lengths = dict.fromkeys(norms, spec.width) | dict.fromkeys(head_norms, spec.key_dim)
    return {f"{name}.weight": ((length,), True) for name, length in lengths.items()}


def with_biases(matrices: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Matrices that are needed, each with a bias that is optional."""
    weights: Shapes = {f"{name}.weight": (shape, True) for name, shape in matrices.items()}
    return weights | {f"{name}.bias": (shape[:1], False) for name, shape in matrices.items()}


def attention(spec: Spec, gguf: Gguf, layer: int) -> Shapes:
    """Projections of one layer; q, k and v may be one matrix."""
    q_rows, k_rows = spec.heads * spec.key_dim, spec.kv_heads * spec.key_dim
    v_rows, o_columns = spec.kv_heads * spec.value_dim, spec.heads * spec.value_dim
    if f"blk.{layer}.attn_qkv.weight" in gguf.tensors:
        matrices = {"attn_qkv": (q_rows + k_rows + v_rows, spec.width)}
    else:
        q_rows *= 2 if spec.has_output_gate else 1
        matrices = {
            "attn_q": (q_rows, spec.width),
            "attn_k": (k_rows, spec.width),
            "attn_v": (v_rows, spec.width),
        }
    return with_biases(matrices | {"attn_output": (spec.width, o_columns)})


def dense_ffn(spec: Spec) -> dict[str, tuple[int, ...]]:
    return {
        "ffn_gate": (spec.ffn, spec.width),
        "ffn_up": (spec.ffn, spec.width),
        "ffn_down": (spec.width, spec.ffn),
    }


def rows(gguf: Gguf, name: str) -> int:
    tensor = gguf.tensors.get(name)
    if tensor is None:
        raise SpecError(f"{gguf.path}: tensor {name!r} is missing")
    return tensor.shape[0]
