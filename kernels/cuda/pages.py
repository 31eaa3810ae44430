"""Keys and values in a GPU's memory: their types, how many bytes they take, storing new ones.

How they lie in a page is told in csrc/attention_kv.cuh. Takes a Launcher and device arrays; knows
neither cupy nor models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from voltapile.kernels.cuda.launch import DeviceArray, Instance, Launcher
from voltapile.kernels.ops import Batch

PAGE_TOKENS = 64
KV_TYPES = {"f16": (1, 2), "q8_0": (16, 18), "q4_0": (32, 18)}  # values, bytes of a block
KINDS = {name: number for number, name in enumerate(KV_TYPES)}  # attention_kv.cuh
LARGEST_DIM = 256
TICKETS = 16384  # rows of one launch of attention that pieces are added up for, most

STORE = Instance("attention_store.cu", "store_kv")


@dataclass(eq=False)
class CudaKv:
    """Keys and values of one layer; how they lie in a page is told in csrc/attention_kv.cuh."""

    keys: DeviceArray  # uint8 [pages, bytes]
    values: DeviceArray
    tickets: DeviceArray  # uint32 [TICKETS], zeros between two launches
    pages: int
    kv_heads: int
    key_dim: int
    value_dim: int
    key_type: str
    value_type: str


def kv_cache(
    ops: Launcher,
    pages: int,
    kv_heads: int,
    page_tokens: int,
    key_dim: int,
    value_dim: int,
    key_type: str,
    value_type: str,
) -> CudaKv:
    if page_tokens != PAGE_TOKENS:
        raise ValueError(f"pages of {page_tokens} positions; the cuda backend has {PAGE_TOKENS}")
    token_bytes = [_kv_bytes(key_type, key_dim), _kv_bytes(value_type, value_dim)]
    keys, values = (
        ops.zeros((pages, kv_heads * page_tokens * each), np.uint8) for each in token_bytes
    )
    tickets = ops.zeros((TICKETS,), np.uint32)
    return CudaKv(keys, values, tickets, pages, kv_heads, key_dim, value_dim, key_type, value_type)


def page_parts(cache: CudaKv) -> tuple[DeviceArray, DeviceArray]:
    """Arrays whose first axis is the page."""
    return cache.keys, cache.values


def store_kv(
    ops: Launcher, cache: CudaKv, k: DeviceArray, v: DeviceArray, batch: Batch, group: int
) -> None:
    tokens, table = len(batch.slots), batch.pages[group]
    assert k.size == tokens * cache.kv_heads * cache.key_dim, (k.shape, tokens)
    assert v.size == tokens * cache.kv_heads * cache.value_dim, (v.shape, tokens)
    if tokens == 0:
        return
    warps = cache.kv_heads * (_groups(cache.key_dim, 32) + _groups(cache.value_dim, 32))
    numbers = table.shape[1], cache.pages, cache.kv_heads, cache.key_dim, cache.value_dim
    kinds = KINDS[cache.key_type], KINDS[cache.value_type]
    pointers = k, v, cache.keys, cache.values, table, batch.slots, batch.positions
    ops.kernel(STORE)(
        (_groups(warps, 4), tokens),
        128,
        (*(array.ptr for array in pointers), *map(np.int32, (*numbers, *kinds))),
    )


def _kv_bytes(kv_type: str, dim: int) -> int:
    """Bytes of one head at one position."""
    if kv_type not in KV_TYPES:
        raise ValueError(f"cache type {kv_type!r}; the cuda backend has {', '.join(KV_TYPES)}")
    length, nbytes = KV_TYPES[kv_type]
    if dim % max(length, 8):
        raise ValueError(
            f"cache type {kv_type}: heads of {dim} are no multiple of {max(length, 8)}"
        )
    if dim > LARGEST_DIM:
        raise ValueError(f"heads of {dim}; the cuda backend has up to {LARGEST_DIM}")
    return dim // length * nbytes


def _groups(items: int, size: int) -> int:
    return -(-items // size)
