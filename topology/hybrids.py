"""Specs of the Qwen families with experts, delta nets, hyper-connections and n-grams.

One small function for each architecture, as in architectures.py. These models can be planned;
which of them can be computed is told by the registry of workers/models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from voltapile.topology.dense import (
    Shapes,
    attention,
    cache,
    decoder,
    dense_ffn,
    ends,
    in_layer,
    rows,
    vector_shapes,
)
from voltapile.topology.keys import Keys
from voltapile.topology.spec import DeltaNet, Experts, Indexer, NGrams, Spec

HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
TABLE = "per_layer_token_embd.weight"
GOLDEN, SEED = 0x9E3779B97F4A7C15, 1234  # of the multipliers that a file may leave out
FIRST_MODULUS = 20_000_000
LEAST_BITS = 8.5  # of a value that decides where a layer's answer goes


def qwen3moe(keys: Keys) -> tuple[Spec, Shapes]:
    """As qwen3, with experts."""
    spec = _with_experts(keys, decoder(keys, "neox", ffn=0))
    shapes = ends(spec)
    for layer in range(spec.layers):
        vectors = vector_shapes(spec, ("attn_norm", "ffn_norm"), HEAD_NORMS)
        parts = vectors | attention(spec, keys.gguf, layer) | _experts(spec, keys, layer)
        shapes |= in_layer(layer, parts)
    return spec, shapes


def qwen3next(keys: Keys) -> tuple[Spec, Shapes]:
    """Delta nets and some attention, with experts; value heads in the order of their key heads."""
    spec = _with_experts(keys, _hybrid(keys, "neox", ffn=0, is_tiled=False))
    return spec, _hybrid_tensors(keys, spec)


def qwen35(keys: Keys) -> tuple[Spec, Shapes]:
    """As qwen3next with value heads in turn, rope for images; qwen35moe has the experts."""
    is_moe = keys.architecture == "qwen35moe"
    spec = _hybrid(keys, "imrope", ffn=0 if is_moe else None, is_tiled=True)
    spec = _with_experts(keys, spec) if is_moe else spec
    return spec, _hybrid_tensors(keys, spec)


def qwen4exp(keys: Keys) -> tuple[Spec, Shapes]:
    """As qwen35moe with four residual streams, n-gram embeddings and sparse attention."""
    spec = _with_experts(keys, _hybrid(keys, "imrope", ffn=0, is_tiled=True))
    assert spec.delta is not None
    assert spec.experts is not None
    spec = msgspec.structs.replace(
        spec,
        experts=msgspec.structs.replace(spec.experts, rounds_input=True),
        delta=msgspec.structs.replace(spec.delta, gate="sigmoid"),
        streams=keys.count("hyper_connection.count", minimum=2),
        stream_rank=keys.count("hyper_connection.low_rank"),
        ngrams=_ngrams(keys, spec),
    )
    spec = _with_warnings(keys, _with_indexer(keys, spec))
    shapes = _hybrid_tensors(keys, spec, norms=())
    del shapes["output_norm.weight"]
    shapes |= _mixer(keys, spec, "output_hc", has_inject=False)
    for layer in range(spec.layers):
        for part in ("attn", "ffn"):
            shapes |= _mixer(keys, spec, f"blk.{layer}.hc_{part}", has_inject=True)
    return spec, shapes | _ngram_tensors(keys, spec) | _indexer_tensors(keys, spec)


# --- experts --------------------------------------------------------------------------------------


def _with_experts(keys: Keys, spec: Spec) -> Spec:
    count, used = keys.count("expert_count"), keys.count("expert_used_count")
    if used > count:
        keys.fail("expert_used_count", f"is {used} of {count} experts")
    has_shared = "blk.0.ffn_up_shexp.weight" in keys.gguf.tensors
    experts = Experts(
        count=count,
        used=used,
        ffn=keys.count("expert_feed_forward_length"),
        shared_ffn=keys.count("expert_shared_feed_forward_length") if has_shared else 0,
    )
    return msgspec.structs.replace(spec, experts=experts)


def _experts(spec: Spec, keys: Keys, layer: int) -> Shapes:
    """Router, routed experts and the shared one; gate and up may be one tensor."""
    assert spec.experts is not None
    count, ffn, shared = spec.experts.count, spec.experts.ffn, spec.experts.shared_ffn
    width = spec.width
    matrices: dict[str, tuple[int, ...]] = {
        "ffn_gate_inp": (count, width),
        "ffn_down_exps": (count, width, ffn),
    }
    if f"blk.{layer}.ffn_gate_up_exps.weight" in keys.gguf.tensors:
        matrices["ffn_gate_up_exps"] = (count, 2 * ffn, width)
    else:
        matrices |= {"ffn_gate_exps": (count, ffn, width), "ffn_up_exps": (count, ffn, width)}
    if shared:
        matrices |= {
            "ffn_gate_inp_shexp": _flat(keys, f"blk.{layer}.ffn_gate_inp_shexp.weight", width),
            "ffn_gate_shexp": (shared, width),
            "ffn_up_shexp": (shared, width),
            "ffn_down_shexp": (width, shared),
        }
    return {f"{name}.weight": (shape, True) for name, shape in matrices.items()}


# --- delta nets -----------------------------------------------------------------------------------


def _hybrid(keys: Keys, layout: str, ffn: int | None, is_tiled: bool) -> Spec:
    """A decoder most of whose layers are delta nets; the others have a gate of their output."""
    spec = decoder(keys, layout, ffn)
    delta = DeltaNet(
        layers=_recurrent(keys, spec.layers),
        key_heads=keys.count("ssm.group_count"),
        value_heads=keys.count("ssm.time_step_rank"),
        head_dim=keys.count("ssm.state_size"),
        conv_kernel=keys.count("ssm.conv_kernel", minimum=2),
        is_tiled=is_tiled,
    )
    if delta.value_heads % delta.key_heads:
        keys.fail(
            "ssm.time_step_rank", f"is {delta.value_heads}, expected a multiple of "
            f"{delta.key_heads} key heads",
        )  # fmt: skip
    inner = keys.count("ssm.inner_size")
    if inner != delta.value_heads * delta.head_dim:
        keys.fail(
            "ssm.inner_size",
            f"is {inner}, expected {delta.value_heads} heads of {delta.head_dim}",
        )
    full = [layer for layer in range(spec.layers) if layer not in delta.layers]
    caches = (cache(full, spec.kv_heads, spec.key_dim, spec.value_dim),) if full else ()
    sections = keys.numbers("rope.dimension_sections") if layout == "imrope" else ()
    rope = msgspec.structs.replace(spec.rope, sections=sections)
    return msgspec.structs.replace(
        spec, delta=delta, caches=caches, has_output_gate=True, rope=rope
    )


def _recurrent(keys: Keys, layers: int) -> tuple[int, ...]:
    """Layers that are delta nets: by flags, else all but every nth."""
    flags = keys.gguf.get(f"{keys.architecture}.attention.recurrent_layers", None)
    if isinstance(flags, np.ndarray):
        if len(flags) < layers:
            keys.fail("attention.recurrent_layers", f"has {len(flags)} entries for {layers} layers")
        return tuple(layer for layer in range(layers) if flags[layer])
    interval = keys.count("full_attention_interval", 4)
    return tuple(layer for layer in range(layers) if (layer + 1) % interval)


def _hybrid_tensors(
    keys: Keys, spec: Spec, norms: Sequence[str] = ("attn_norm", "post_attention_norm")
) -> Shapes:
    assert spec.delta is not None
    shapes = ends(spec)
    for layer in range(spec.layers):
        parts = vector_shapes(spec, norms)
        if layer in spec.delta.layers:
            parts |= _delta_net(keys, spec, spec.delta, layer)
        else:
            parts |= vector_shapes(spec, (), HEAD_NORMS) | attention(spec, keys.gguf, layer)
        if spec.experts:
            parts |= _experts(spec, keys, layer)
        else:
            parts |= {f"{name}.weight": (shape, True) for name, shape in dense_ffn(spec).items()}
        shapes |= in_layer(layer, parts)
    return shapes


def _delta_net(keys: Keys, spec: Spec, delta: DeltaNet, layer: int) -> Shapes:
    keys_rows = delta.key_heads * delta.head_dim
    inner = delta.value_heads * delta.head_dim
    conv = 2 * keys_rows + inner
    found: dict[str, tuple[int, ...]] = {
        "ssm_conv1d.weight": (conv, delta.conv_kernel),
        "ssm_dt.bias": (delta.value_heads,),
        "ssm_a": (delta.value_heads,),
        "ssm_norm.weight": (delta.head_dim,),
        "ssm_out.weight": (spec.width, inner),
    }
    if f"blk.{layer}.ssm_in.weight" in keys.gguf.tensors:  # older files of qwen3next
        found["ssm_in.weight"] = (conv + inner, spec.width)
    else:
        found |= {"attn_qkv.weight": (conv, spec.width), "attn_gate.weight": (inner, spec.width)}
    if delta.is_tiled:
        found["ssm_beta.weight"] = found["ssm_alpha.weight"] = (delta.value_heads, spec.width)
    else:
        found["ssm_ba.weight"] = (2 * delta.value_heads, spec.width)
    return {name: (shape, True) for name, shape in found.items()}


# --- qwen4exp -------------------------------------------------------------------------------------


def _ngrams(keys: Keys, spec: Spec) -> NGrams:
    layers = keys.numbers("ple.layers")
    if len(layers) != 1 or not 0 <= layers[0] < spec.layers:
        keys.fail("ple.layers", f"is {list(layers)}, expected one of {spec.layers} layers")
    size = keys.count("ple.ngram_size", minimum=2)
    heads = (size - 1) * keys.count("ple.heads_per_ngram")
    multipliers, moduli, offsets = _hash(keys, spec, size, heads)
    return NGrams(
        layer=layers[0],
        size=size,
        heads=heads,
        multipliers=multipliers,
        moduli=moduli,
        offsets=offsets,
        boundary=keys.count("ple.eos_token_id", minimum=0),
        rows=rows(keys.gguf, TABLE),
        row_width=keys.count("embedding_length_per_layer_input"),
        conv_kernel=keys.count("ple.conv_kernel", minimum=2),
    )


def _hash(
    keys: Keys, spec: Spec, size: int, heads: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Multipliers, moduli and offsets; computed where the file has none (models.md 7.1)."""
    names = "layer_multipliers", "head_vocab_sizes", "head_offsets"
    if all(keys.has(f"ple.{name}") for name in names):
        found = [keys.numbers(f"ple.{name}") for name in names]
    else:
        moduli = _primes_from(FIRST_MODULUS, heads)
        offsets = [sum(moduli[:head]) for head in range(heads)]
        found = [_multipliers(spec.vocab, size), tuple(moduli), tuple(offsets)]
    for name, values, count in zip(names, found, (size, heads, heads), strict=True):
        if len(values) != count or min(values) < 0:
            keys.fail(f"ple.{name}", f"is {list(values)}, expected {count} numbers")
    end = max(a + b for a, b in zip(found[1], found[2], strict=True))
    if min(found[1]) < 1 or end > rows(keys.gguf, TABLE):
        keys.fail("ple.head_vocab_sizes", f"lead to row {end} of {rows(keys.gguf, TABLE)}")
    return found[0], found[1], found[2]


def _multipliers(vocab: int, size: int) -> tuple[int, ...]:
    half = (2**63 - 1) // vocab // 2

    def mixed(z: int) -> int:  # splitmix64
        z = (z + GOLDEN) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    return tuple(2 * (mixed((SEED + GOLDEN * (i + 1)) % 2**64) % half) + 1 for i in range(size))


def _primes_from(first: int, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        if all(first % divisor for divisor in range(2, math.isqrt(first) + 1)):
            found.append(first)
        first += 1
    return found


def _with_indexer(keys: Keys, spec: Spec) -> Spec:
    """Attention layers with a compression ratio choose blocks; those with 0 see everything."""
    assert spec.delta is not None
    ratios = keys.numbers("attention.compress_ratios")
    if len(ratios) < spec.layers:
        keys.fail("attention.compress_ratios", f"has {len(ratios)} entries, not {spec.layers}")
    full = [layer for layer in range(spec.layers) if layer not in spec.delta.layers]
    sparse = [layer for layer in full if ratios[layer]]
    dense = [layer for layer in full if not ratios[layer]]
    blocks = {ratios[layer] for layer in sparse}
    if len(blocks) > 1:
        keys.fail("attention.compress_ratios", f"has several block lengths: {sorted(blocks)}")
    indexer = Indexer(
        heads=keys.count("attention.indexer.head_count"),
        key_dim=keys.count("attention.indexer.key_length"),
        top_k=keys.count("attention.indexer.top_k"),
        block=max(blocks, default=1),
        layers=tuple(i for i in full if f"blk.{i}.indexer.k_proj.weight" in keys.gguf.tensors),
    )
    dims = spec.kv_heads, spec.key_dim, spec.value_dim
    caches = [cache(dense, *dims)] if dense else []
    if sparse:
        index = {"index_dim": indexer.key_dim, "index_block": indexer.block}
        caches.append(msgspec.structs.replace(cache(sparse, *dims), kind="qsa", **index))
    return msgspec.structs.replace(spec, caches=tuple(caches), indexer=indexer)


def _with_warnings(keys: Keys, spec: Spec) -> Spec:
    """Of what converters and quantisers are known to get wrong."""
    found, tensors = [], keys.gguf.tensors
    assert spec.indexer is not None
    if spec.indexer.layers and not any(need.index_dim for need in spec.caches):
        found.append(
            "attention.compress_ratios are all 0, although the file has indexers: a converter has "
            "probably looked for layers by a name that its transformers package had changed. So "
            "all attention is dense here, which the model was not trained for: convert the file "
            "anew, or set the ratios with --compress-ratio 4"
        )
    coarse = [
        name
        for name, tensor in tensors.items()
        if "_inject." in name and 8 * tensor.nbytes < LEAST_BITS * math.prod(tensor.shape)
    ]
    if coarse:
        found.append(
            f"{len(coarse)} tensors that mix residual streams have fewer bits than Q8_0, which "
            f"costs accuracy in every layer: {', '.join(coarse[:3])}"
            f"{' ...' if len(coarse) > 3 else ''}"
        )
    return msgspec.structs.replace(spec, warnings=tuple(found))


def _mixer(keys: Keys, spec: Spec, prefix: str, has_inject: bool) -> Shapes:
    """The tensors that mix residual streams into one input."""
    wide = spec.streams * spec.width
    shapes: Shapes = {
        f"{prefix}_norm.weight": (_flat(keys, f"{prefix}_norm.weight", wide), True),
        f"{prefix}_down.weight": ((spec.stream_rank, wide), True),
        f"{prefix}_up.weight": ((wide, spec.stream_rank), True),
    }
    if has_inject:
        shapes[f"{prefix}_inject.weight"] = (spec.streams, wide), True
    return shapes


def _ngram_tensors(keys: Keys, spec: Spec) -> Shapes:
    assert spec.ngrams is not None
    grams, wide = spec.ngrams, spec.streams * spec.width
    blk = f"blk.{grams.layer}"
    shapes: Shapes = {
        TABLE: ((grams.rows, grams.row_width), True),
        f"{blk}.ple_key.weight": ((wide, grams.heads * grams.row_width), True),
        f"{blk}.ple_value.weight": ((spec.width, grams.heads * grams.row_width), True),
        f"{blk}.ple_conv1d.weight": ((wide, grams.conv_kernel), True),
    }
    for part in ("key", "query", "conv"):
        name = f"{blk}.ple_norm_{part}.weight"
        shapes[name] = _flat(keys, name, wide), True
    return shapes


def _indexer_tensors(keys: Keys, spec: Spec) -> Shapes:
    """Needed by layers that choose blocks; files have them in the others, too."""
    assert spec.indexer is not None
    indexer, sparse = (
        spec.indexer,
        {i for need in spec.caches if need.index_dim for i in need.layers},
    )
    found: dict[str, tuple[int, ...]] = {
        "indexer.q_proj.weight": (indexer.heads * indexer.key_dim, spec.width),
        "indexer.k_proj.weight": (indexer.key_dim, spec.width),
        "indexer.q_norm.weight": (indexer.key_dim,),
        "indexer.k_norm.weight": (indexer.key_dim,),
    }
    shapes: Shapes = {}
    for need in spec.caches:
        for layer in need.layers:
            needed = {name: (shape, layer in sparse) for name, shape in found.items()}
            shapes |= in_layer(layer, needed)
    return shapes


def _flat(keys: Keys, name: str, length: int) -> tuple[int, ...]:
    """A vector's shape, which some files give another dimension."""
    tensor = keys.gguf.tensors.get(name)
    if tensor is not None and math.prod(tensor.shape) == length:
        return tensor.shape
    return (length,)
