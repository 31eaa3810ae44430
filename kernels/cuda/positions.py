"""kernels/positions.py on a GPU: attention to what a rank keeps, and how the parts are joined.

Takes a Launcher and device arrays; knows neither cupy, nor ranks, nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from voltapile.kernels.cuda.attention import attention
from voltapile.kernels.cuda.launch import DeviceArray, Instance, Launcher
from voltapile.kernels.ops import Batch
from voltapile.kernels.positions import Kept, Runs

SEEN, STORED = (Instance("positions.cu", name) for name in ("keep_seen", "keep_stored"))
WEIGH, TAKE = (Instance("positions.cu", name, waits=True) for name in ("weigh", "take_columns"))
INSTANCES = [SEEN, STORED, WEIGH, TAKE]
THREADS = 128


class CudaPositions:
    """See kernels/positions.py for the meaning of every method."""

    def kept(self: Launcher, batch: Batch, runs: Runs) -> Kept:
        count = len(batch.slots)
        seen, stored, slots = (self.scratch((count,), np.int32) for _ in range(3))
        grid, kept = (_groups(count),), (runs.part, runs.parts, runs.run)
        numbers = [np.int32(number) for number in (count, *kept, len(batch.pages[0]) - 1)]
        self.kernel(SEEN)(grid, THREADS, (batch.positions.ptr, seen.ptr, *numbers[:-1]))
        arrays = batch.positions, batch.slots, seen, stored, slots
        self.kernel(STORED)(grid, THREADS, (*(each.ptr for each in arrays), *numbers))
        return Kept(replace(batch, positions=seen), replace(batch, positions=stored, slots=slots))

    def attention_part(
        self: Launcher,
        q: DeviceArray,
        cache: Any,
        seen: Batch,
        group: int,
        head_map: Sequence[int],
        scale: float,
        softcap: float = 0.0,
    ) -> tuple[DeviceArray, DeviceArray]:
        weights = self.scratch((len(seen.slots), len(head_map)))
        out = attention(self, q, cache, seen, group, head_map, scale, 0, softcap, weights)
        return out, weights

    def weigh_(
        self: Launcher, o: DeviceArray, weights: DeviceArray, all_weights: DeviceArray
    ) -> DeviceArray:
        (tokens, width), heads = o.shape, weights.shape[1]
        parts = all_weights.shape[1] // heads
        assert weights.shape == (tokens, heads), (o, weights)
        assert all_weights.shape == (tokens, parts * heads), (weights, all_weights)
        assert width % heads == 0, (o, weights)
        numbers = map(np.int32, (width, heads, parts))
        self.kernel(WEIGH)(
            (_groups(width), tokens),
            THREADS,
            (o.ptr, weights.ptr, all_weights.ptr, *numbers),
        )
        return o

    def take(self: Launcher, x: DeviceArray, width: int, offset: int) -> DeviceArray:
        tokens, whole = x.shape
        assert 0 <= offset <= offset + width <= whole, (x, width, offset)
        out = self.scratch((tokens, width))
        self.kernel(TAKE)(
            (_groups(width), tokens),
            THREADS,
            (x.ptr, out.ptr, *map(np.int32, (width, whole, offset))),
        )
        return out


def _groups(items: int) -> int:
    return -(-items // THREADS)
