"""Attention to chosen blocks of positions on the CPU; see kernels/families.py, csrc/sparse.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from voltapile.kernels.cpu import _cpu
from voltapile.kernels.cpu.ops import CpuKv, CpuOps
from voltapile.kernels.cpu.weights import flat
from voltapile.kernels.families import INDEX_RING, IndexHeads
from voltapile.kernels.ops import Batch, Weight

SCORES_BYTES = 32 << 20  # of the tokens that are scored together
COLUMNS = 16  # a page's keys are padded to a multiple of so many blocks


@dataclass(eq=False)
class IndexCache:
    """ring [page, position % INDEX_RING, dim]: the last keys; pooled [page, dim, block in page]."""

    ring: np.ndarray
    pooled: np.ndarray
    page_tokens: int
    block: int


@dataclass(eq=False)
class Chosen:
    """blocks int32 [T, most], of which counts [T] hold, ascending."""

    blocks: np.ndarray
    counts: np.ndarray
    block: int


class CpuSparse(IndexHeads, CpuOps):
    def index_cache(self, pages: int, page_tokens: int, dim: int, block: int) -> IndexCache:
        assert page_tokens % INDEX_RING == INDEX_RING % block == 0, "a block lies in one page"
        pitch = -(-page_tokens // block // COLUMNS) * COLUMNS
        ring = self._counted((pages, INDEX_RING, dim), np.float32, "kv")
        pooled = self._counted((pages, dim, pitch), np.float32, "kv")
        return IndexCache(ring, pooled, page_tokens, block)

    def index_store(
        self,
        cache: IndexCache,
        keys: np.ndarray,
        norm: Weight,
        rope: tuple[np.ndarray, float],
        batch: Batch,
        group: int,
        eps: float,
    ) -> None:
        inv_freq, scale = rope
        assert keys.shape == (len(batch.slots), cache.ring.shape[2]), keys.shape
        assert 2 * len(inv_freq) <= keys.shape[1], (keys.shape, inv_freq.shape)
        self._engine.index_store(
            cache.ring,
            cache.pooled,
            cache.page_tokens,
            cache.block,
            keys,
            flat(norm),
            np.ascontiguousarray(inv_freq, np.float32),
            scale,
            eps,
            batch.slots,
            batch.positions,
            batch.pages[group],
        )

    def choose_blocks(
        self,
        q: np.ndarray,
        cache: IndexCache,
        batch: Batch,
        group: int,
        heads: int,
        top_k: int,
    ) -> Chosen:
        tokens, table = len(batch.slots), batch.pages[group]
        assert q.shape == (tokens, heads * cache.ring.shape[2]), (q.shape, heads)
        most = max(1, top_k // cache.block)
        chosen = self._scratch.array((tokens, most), np.int32)
        counts = self._scratch.array((tokens,), np.int32)
        blocks = table.shape[1] * cache.page_tokens // cache.block
        wave = max(1, min(tokens, SCORES_BYTES // (4 * blocks)))
        with self._scratch.scope():
            self._engine.choose_blocks(
                cache.ring,
                cache.pooled,
                cache.page_tokens,
                cache.block,
                q,
                heads,
                batch.slots,
                batch.positions,
                table,
                self._scratch.array((wave, blocks)),
                chosen,
                counts,
            )
        return Chosen(chosen, counts, cache.block)

    def attention_to(
        self,
        chosen: Chosen,
        q: np.ndarray,
        cache: CpuKv,
        batch: Batch,
        group: int,
        head_map: Sequence[int],
        scale: float,
        gate: np.ndarray | None = None,
    ) -> np.ndarray:
        tokens, heads = len(batch.slots), len(head_map)
        assert q.size == tokens * heads * cache.key_dim, (q.shape, tokens, heads)
        out = self._scratch.array((tokens, heads * cache.value_dim))
        places = batch.slots, batch.positions, batch.pages[group]
        seen = cache.handle, chosen.blocks, chosen.counts, chosen.block, *places, head_map
        with self._scratch.scope():
            nodes = self._scratch.array((_cpu.chosen_node_floats(*seen),))
            self._engine.attention_to(q, out, *seen, scale, nodes)
        return out if gate is None else self.gate_(out, gate)  # type: ignore[attr-defined]
