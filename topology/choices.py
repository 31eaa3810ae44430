"""What a user's options change of a model: named in the Plan, so that every rank has the same Spec.

Knows neither machines nor memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING

import msgspec
from voltapile.topology.spec import CacheNeed, Rope, Spec, SpecError

if TYPE_CHECKING:
    from voltapile.topology.plan import Options

SCALINGS = ("none", "linear", "yarn")


def chosen(options: Options) -> dict[str, str]:
    """For a Plan's choices: what is not as the file says."""
    found = {
        "router_input": options.router_input,
        "rope_scaling": options.rope_scaling,
        "rope_scale": f"{options.rope_scale:g}" if options.rope_scale else "",
        "rope_original": str(options.rope_original or ""),
        "compress_ratio": str(options.compress_ratio or ""),
    }
    return {name: value for name, value in found.items() if value}


def as_chosen(spec: Spec, choices: Mapping[str, str]) -> Spec:
    """With what a Plan's choices change. Raises SpecError."""
    if spec.experts is not None and choices.get("router_input") == "f32":
        exact = msgspec.structs.replace(spec.experts, rounds_input=False)
        spec = msgspec.structs.replace(spec, experts=exact)
    if any(name.startswith("rope_") for name in choices):
        spec = _with_rope(spec, choices)
    if ratio := choices.get("compress_ratio"):
        spec = _with_ratio(spec, int(ratio))
    return spec


def _with_rope(spec: Spec, choices: Mapping[str, str]) -> Spec:
    """The rope of layers that see all positions; the context is what it reaches then."""
    rope = spec.rope
    scaling = choices.get("rope_scaling") or (rope.scaling if rope.factor != 1.0 else "linear")
    factor = float(choices.get("rope_scale", rope.factor))
    original = int(choices.get("rope_original", rope.original_context))
    if scaling not in SCALINGS:
        raise SpecError(f"--rope-scaling {scaling}: expected one of {', '.join(SCALINGS)}")
    if not 1.0 <= factor < inf or original < 1:
        raise SpecError(
            f"--rope-scale {factor:g}, --yarn-orig-ctx {original}: expected 1 or more of each"
        )
    if scaling != "none" and factor == 1.0:
        raise SpecError(f"--rope-scaling {scaling} needs --rope-scale, e.g. 4 for 4 times as far")
    if scaling == "none":
        factor = 1.0
    changed: Rope = msgspec.structs.replace(
        rope, scaling=scaling, factor=factor, original_context=original
    )
    return msgspec.structs.replace(spec, rope=changed, context=int(original * factor))


def _with_ratio(spec: Spec, ratio: int) -> Spec:
    """Layers with an indexer choose blocks of so many positions."""
    if spec.indexer is None or not spec.indexer.layers:
        raise SpecError(f"--compress-ratio {ratio}: the file has no layer with an indexer")
    if not 1 <= ratio <= 16 or 16 % ratio:
        raise SpecError(f"--compress-ratio {ratio}: expected 1, 2, 4, 8 or 16")
    indexer = msgspec.structs.replace(spec.indexer, block=ratio)
    layers = sorted(layer for need in spec.caches for layer in need.layers)
    caches = _split(spec.caches[0], layers, indexer.layers, indexer.key_dim, ratio)
    warnings = tuple(each for each in spec.warnings if "compress_ratios" not in each)
    return msgspec.structs.replace(spec, indexer=indexer, caches=caches, warnings=warnings)


def _split(
    need: CacheNeed, layers: list[int], sparse: tuple[int, ...], key_dim: int, ratio: int
) -> tuple[CacheNeed, ...]:
    plain = msgspec.structs.replace(need, kind="full", index_dim=0, index_block=1)
    dense = tuple(layer for layer in layers if layer not in sparse)
    found = [msgspec.structs.replace(plain, layers=dense)] if dense else []
    chosen_from = {"kind": "qsa", "index_dim": key_dim, "index_block": ratio}
    found.append(msgspec.structs.replace(plain, layers=sparse, **chosen_from))
    return tuple(found)
