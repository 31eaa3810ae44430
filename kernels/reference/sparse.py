"""Attention to chosen blocks of positions in plain numpy; see kernels/families.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from voltapile.kernels.families import INDEX_RING, IndexHeads
from voltapile.kernels.ops import Array, Batch, Weight
from voltapile.kernels.reference.ops import PagedKV, ReferenceOps


@dataclass(eq=False)
class IndexCache:
    """ring [page, position % INDEX_RING, dim]: the last keys; pooled [page, block in page, dim]."""

    ring: np.ndarray
    pooled: np.ndarray
    block: int


class ReferenceSparse(IndexHeads, ReferenceOps):
    def index_cache(self, pages: int, page_tokens: int, dim: int, block: int) -> IndexCache:
        assert page_tokens % INDEX_RING == INDEX_RING % block == 0, "a block lies in one page"
        ring = np.zeros((pages, INDEX_RING, dim), np.float32)
        pooled = np.zeros((pages, page_tokens // block, dim), np.float32)
        self.taken["kv"] += ring.nbytes + pooled.nbytes
        return IndexCache(ring, pooled, block)

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
        block, per_page = cache.block, cache.pooled.shape[1]
        for t, (slot, position) in enumerate(zip(batch.slots, batch.positions, strict=True)):
            page = batch.pages[group][slot, position // (block * per_page)]
            cache.ring[page, position % INDEX_RING] = keys[t]
            if (position + 1) % block == 0:
                first = position - block + 1
                place = first % INDEX_RING
                mean = cache.ring[page, place : place + block].mean(axis=0, keepdims=True)
                pooled = self.rms_norm(mean, norm, eps)
                angles = self.rope_angles(np.array([first]), *rope)
                self.rope_(pooled, angles, keys.shape[1], "neox")
                cache.pooled[page, position // block % per_page] = pooled[0]

    def choose_blocks(
        self, q: np.ndarray, cache: IndexCache, batch: Batch, group: int, heads: int, top_k: int
    ) -> list[np.ndarray]:
        """The visible positions of each token."""
        block, per_page = cache.block, cache.pooled.shape[1]
        chosen = []
        for t, (slot, position) in enumerate(zip(batch.slots, batch.positions, strict=True)):
            whole = np.arange((position + 1) // block)
            keys = cache.pooled[batch.pages[group][slot, whole // per_page], whole % per_page]
            scores = np.maximum(q[t].reshape(heads, -1) @ keys.T, 0).sum(axis=0)
            best = np.sort(np.argsort(-scores, kind="stable")[: top_k // block])
            positions = (best[:, None] * block + np.arange(block)).reshape(-1)
            chosen.append(np.concatenate([positions, np.arange(len(whole) * block, position + 1)]))
        return chosen

    def attention_to(
        self,
        chosen: list[np.ndarray],
        q: np.ndarray,
        cache: PagedKV,
        batch: Batch,
        group: int,
        head_map: Sequence[int],
        scale: float,
        gate: np.ndarray | None = None,
    ) -> Array:
        page_tokens, heads = cache.keys.shape[1], list(head_map)
        out = np.zeros((len(q), len(heads), cache.values.shape[3]), np.float32)
        for t, (slot, at) in enumerate(zip(batch.slots, chosen, strict=True)):
            page, place = batch.pages[group][slot, at // page_tokens], at % page_tokens
            keys, values = cache.keys[page, place][:, heads], cache.values[page, place][:, heads]
            query = q[t].reshape(len(heads), -1)
            scores = np.einsum("hd,phd->hp", query, keys) * np.float32(scale)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[t] = np.einsum("hp,phd->hd", weights, values)
        y = out.reshape(len(q), -1)
        return y if gate is None else self.gate_(y, gate)  # type: ignore[attr-defined]
