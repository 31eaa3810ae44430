"""Launcher of what happens to q, k and v before attention: norms of heads, rope, into the cache.

Takes a Launcher and device arrays; knows neither cupy nor models.
"""

from __future__ import annotations

import numpy as np
from voltapile.kernels.cuda import clusters
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Launcher
from voltapile.kernels.cuda.pages import KINDS, LARGEST_DIM, CudaKv
from voltapile.kernels.cuda.split import late_part
from voltapile.kernels.cuda.spread import spread
from voltapile.kernels.ops import Batch

# By the longest head.
ROPE_STORE = {
    longest: Instance(
        "attention_heads.cu", "rope_store", (("HEAD", str(longest)),), is_exact=True, waits=True
    )
    for longest in (128, LARGEST_DIM)
}
INSTANCES = list(ROPE_STORE.values())

WARPS = 4  # of a block, and heads


def rope_store(
    ops: Launcher,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    angles: DeviceArray,
    layout: str,
    cache: CudaKv,
    batch: Batch,
    group: int,
    eps: float,
    norms: tuple[CudaWeight | None, CudaWeight | None],
) -> DeviceArray:
    tokens, table, dim = len(batch.slots), batch.pages[group], cache.key_dim
    heads, pairs = q.size // max(1, tokens) // dim, angles.shape[1]
    assert layout in ("norm", "neox"), layout
    assert q.size == tokens * heads * dim, (q.shape, tokens, dim)
    assert k.size == tokens * cache.kv_heads * dim, (k.shape, tokens)
    assert v.size == tokens * cache.kv_heads * cache.value_dim, (v.shape, tokens)
    assert len(angles) == tokens, (angles, tokens)
    assert 2 * pairs <= dim, (angles, dim)
    assert all(each is None or each.shape == (dim,) for each in norms), norms
    if tokens == 0:
        return q
    late = late_part(q)
    assert late is None or late.dim == dim, (late, dim)
    came = (q.ptr, dim) if late is None else late.take()
    apart = 1 if layout == "norm" else pairs
    sizes = heads, cache.kv_heads, dim, cache.value_dim, pairs, apart
    kinds = KINDS[cache.key_type], KINDS[cache.value_type]
    pointers = angles, cache.keys, cache.values, table, batch.slots, batch.positions
    longest = min(each for each in ROPE_STORE if each >= max(dim, cache.value_dim))
    blocks, shared = -(-(heads + 2 * cache.kv_heads) // WARPS), 4 * WARPS * longest
    if tokens >= clusters.FROM:  # behind a product that leaves few multiprocessors
        shared += spread(ops, blocks * tokens, shared)
    ops.kernel(ROPE_STORE[longest])(
        (blocks, tokens),
        32 * WARPS,
        (
            *(q.ptr, came[0], np.int32(came[1]), k.ptr, v.ptr),
            *(0 if each is None else each.ptr for each in norms),
            *(array.ptr for array in pointers),
            *map(np.int32, sizes),
            np.float32(eps),
            *map(np.int32, (table.shape[1], cache.pages, *kinds)),
        ),
        shared,
    )
    return q
