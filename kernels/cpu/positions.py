"""kernels/positions.py on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from voltapile.kernels.cpu.ops import CpuKv, CpuOps
from voltapile.kernels.ops import Batch
from voltapile.kernels.positions import Kept, Runs


class CpuPositions(CpuOps):
    def kept(self, batch: Batch, runs: Runs) -> Kept:
        count = len(batch.slots)
        seen, stored, slots = (self._scratch.array((count,), np.int32) for _ in range(3))
        padding = len(batch.pages[0]) - 1
        self._engine.keep(
            batch.positions,
            batch.slots,
            seen,
            stored,
            slots,
            runs.part,
            runs.parts,
            runs.run,
            padding,
        )
        return Kept(replace(batch, positions=seen), replace(batch, positions=stored, slots=slots))

    def attention_part(
        self,
        q: np.ndarray,
        cache: CpuKv,
        seen: Batch,
        group: int,
        head_map: Sequence[int],
        scale: float,
        softcap: float = 0.0,
    ) -> tuple[np.ndarray, np.ndarray]:
        weights = self._scratch.array((len(seen.slots), len(head_map)))
        out = self._attend(q, cache, seen, group, head_map, scale, 0, softcap, weights)
        return out, weights

    def weigh_(self, o: np.ndarray, weights: np.ndarray, all_weights: np.ndarray) -> np.ndarray:
        self._engine.weigh(o, weights, all_weights)
        return o

    def take(self, x: np.ndarray, width: int, offset: int) -> np.ndarray:
        assert 0 <= offset <= offset + width <= x.shape[1], (x.shape, width, offset)
        out = self._scratch.array((len(x), width))
        self._engine.take(x, out, offset)
        return out
