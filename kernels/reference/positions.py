"""kernels/positions.py in plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from voltapile.kernels.ops import Array, Batch
from voltapile.kernels.positions import Kept, Runs
from voltapile.kernels.reference.ops import ReferenceOps


class ReferencePositions(ReferenceOps):
    def kept(self, batch: Batch, runs: Runs) -> Kept:
        cycle, end = runs.run * runs.parts, batch.positions + 1
        own = np.clip(end % cycle - runs.part * runs.run, 0, runs.run)
        positions = (end // cycle * runs.run + own - 1).astype(np.int32)
        is_here = batch.positions // runs.run % runs.parts == runs.part
        slots = np.where(is_here, batch.slots, len(batch.pages[0]) - 1).astype(np.int32)
        seen = replace(batch, positions=positions)
        return Kept(seen, replace(seen, slots=slots, positions=np.maximum(positions, 0)))

    def attention_part(
        self,
        q: Array,
        cache: Any,
        seen: Batch,
        group: int,
        head_map: Sequence[int],
        scale: float,
        softcap: float = 0.0,
    ) -> tuple[Array, Array]:
        return self.attend(q, cache, seen, group, head_map, scale, 0, softcap)

    def weigh_(self, o: Array, weights: Array, all_weights: Array) -> Array:
        heads = weights.shape[1]
        parts = all_weights.reshape(len(o), -1, heads)
        top = parts.max(axis=1)
        shares = np.exp(weights - top) / np.exp(parts - top[:, None]).sum(axis=1)
        o *= np.repeat(shares, o.shape[1] // heads, axis=1)
        return o

    def take(self, x: Array, width: int, offset: int) -> Array:
        return np.ascontiguousarray(x[:, offset : offset + width])
