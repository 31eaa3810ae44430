"""Launcher of what happens to q, k and v before attention: norms of heads, rope, into the cache.

Takes a Launcher and device arrays; knows neither cupy nor models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Launcher
from voltapile.kernels.cuda.pages import KINDS, LARGEST_DIM, CudaKv
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


@dataclass(frozen=True, eq=False)
class RawHeads:
    """q, k and v of a step's tokens as their product left them, and what is to become of them."""

    q: DeviceArray
    k: DeviceArray
    v: DeviceArray
    angles: DeviceArray
    layout: str
    cache: CudaKv
    batch: Batch
    group: int
    eps: float
    norms: tuple[CudaWeight | None, CudaWeight | None]

    def __post_init__(self) -> None:
        tokens, cache, dim = len(self.batch.slots), self.cache, self.cache.key_dim
        assert self.layout in ("norm", "neox"), self.layout
        assert self.q.size == tokens * self.heads * dim, (self.q.shape, tokens, dim)
        assert self.k.size == tokens * cache.kv_heads * dim, (self.k.shape, tokens)
        assert self.v.size == tokens * cache.kv_heads * cache.value_dim, (self.v.shape, tokens)
        assert len(self.angles) == tokens, (self.angles, tokens)
        assert 2 * self.pairs <= dim, (self.angles, dim)
        assert all(each is None or each.shape == (dim,) for each in self.norms), self.norms

    def belongs_to(self, q: DeviceArray, cache: CudaKv, batch: Batch, group: int) -> bool:
        same = self.cache is cache and self.batch is batch
        return same and (self.q.ptr, self.group) == (q.ptr, group)

    @property
    def heads(self) -> int:
        return self.q.size // max(1, len(self.batch.slots)) // self.cache.key_dim

    @property
    def pairs(self) -> int:
        return self.angles.shape[1]

    @property
    def apart(self) -> int:
        """How far the two values of a pair lie from each other."""
        return 1 if self.layout == "norm" else self.pairs

    @property
    def norm_ptrs(self) -> tuple[int, int]:
        q, k = (0 if each is None else each.ptr for each in self.norms)
        return q, k


def rope_store(ops: Launcher, raw: RawHeads) -> DeviceArray:
    cache, batch = raw.cache, raw.batch
    tokens, table, dim = len(batch.slots), batch.pages[raw.group], cache.key_dim
    if tokens == 0:
        return raw.q
    sizes = raw.heads, cache.kv_heads, dim, cache.value_dim, raw.pairs, raw.apart
    kinds = KINDS[cache.key_type], KINDS[cache.value_type]
    pointers = raw.angles, cache.keys, cache.values, table, batch.slots, batch.positions
    longest = min(each for each in ROPE_STORE if each >= max(dim, cache.value_dim))
    ops.kernel(ROPE_STORE[longest])(
        (-(-(raw.heads + 2 * cache.kv_heads) // WARPS), tokens),
        32 * WARPS,
        (
            *(raw.q.ptr, raw.k.ptr, raw.v.ptr, *raw.norm_ptrs),
            *(array.ptr for array in pointers),
            *map(np.int32, sizes),
            np.float32(raw.eps),
            *map(np.int32, (table.shape[1], cache.pages, *kinds)),
        ),
        4 * WARPS * longest,
    )
    return raw.q
