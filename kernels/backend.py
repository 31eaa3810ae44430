"""What each backend is, in plain numbers, for whoever plans with it.

describe() gives the fields of topology's Backend record, which this package must not import. It
allocates nothing and starts nothing; the formats of the cpu backend come from its C++ module.
"""

from __future__ import annotations

from typing import Any

from voltapile.shm.formats import FORMATS, format_of

NAMES = ("cpu", "reference", "cuda")


def describe(name: str) -> dict[str, Any]:
    """The fields of topology.plan.Backend. Raises ValueError for a name that is not in NAMES."""
    if name == "cpu":
        return _describe_cpu()
    if name == "reference":
        return _describe_reference()
    if name == "cuda":
        return _describe_cuda()
    raise ValueError(f"unknown backend {name!r}; there are {', '.join(NAMES)}")


def _describe_cpu() -> dict[str, Any]:
    from voltapile.kernels.cpu import _cpu
    from voltapile.kernels.cpu.collectives import ROOM
    from voltapile.kernels.cpu.ops import KV_TYPES

    columns = 4096
    return {
        "name": "cpu",
        "formats": [kind.name for kind in FORMATS.values() if _cpu.is_supported(kind.id)],
        "kv_types": KV_TYPES,
        "page_tokens": 64,
        "max_decode_rows": 64,
        "activation_bytes": _cpu.quantised_bytes(1, columns) / columns,
        "reserve_bytes": 160 << 20,
        "host_reserve_bytes": 0,
        "captures": True,
        "in_vram": False,
        "workspace_bytes": 0,
        "unpacked_bytes": 0.0,
        "choices": {},
        "group_bytes": ROOM,
        "splits_positions": True,
    }


def _describe_reference() -> dict[str, Any]:
    from voltapile.kernels.reference.collectives import ROOM

    return {
        "name": "reference",
        # Everything that the gguf package dequantises.
        "formats": [kind.name for kind in FORMATS.values() if kind.name not in _NOT_WEIGHTS],
        "kv_types": {"f32": (1, 4)},
        "page_tokens": 64,
        "max_decode_rows": 8,
        "activation_bytes": 0.0,
        "reserve_bytes": 256 << 20,
        "host_reserve_bytes": 0,
        "captures": False,
        "in_vram": False,
        "workspace_bytes": 0,
        "unpacked_bytes": 0.0,
        "choices": {},
        "group_bytes": ROOM,
        "splits_positions": True,
    }


def _describe_cuda() -> dict[str, Any]:
    from voltapile.kernels.cuda.chunks import REPACKED
    from voltapile.kernels.cuda.file_table import ROWS
    from voltapile.kernels.cuda.links import ROOM
    from voltapile.kernels.cuda.matmul import CUBLAS_FROM, FUSED_FROM
    from voltapile.kernels.cuda.pages import KV_TYPES
    from voltapile.kernels.cuda.rows import FORMATS as WITH_HEADER
    from voltapile.kernels.cuda.rows import MAX_ROWS

    return {
        "name": "cuda",
        "formats": list(WITH_HEADER),
        "kv_types": KV_TYPES,
        "page_tokens": 64,
        "max_decode_rows": 64,
        "activation_bytes": 4.0,
        # The driver's context, loaded kernels, recorded steps, constants: measured on an H200.
        "reserve_bytes": 1 << 30,
        # Of the host: CUDA's own, the interpreter, pinned rings. An estimate.
        "host_reserve_bytes": 1 << 30,
        "captures": True,
        "in_vram": True,
        # Partial results of attention over long contexts, and alignment.
        "workspace_bytes": 96 << 20,
        "unpacked_bytes": 2.0,
        "group_bytes": ROOM,
        "splits_positions": True,
        "staged_rows": ROWS,
        "most_tokens": MAX_ROWS,
        "choices": {"fused_from": str(FUSED_FROM), "cublas_from": str(CUBLAS_FROM)},
        "repacked": {
            before: (format_of(before).block_bytes, format_of(after).block_bytes)
            for before, after in REPACKED.items()
        },
    }


_NOT_WEIGHTS = {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"}
