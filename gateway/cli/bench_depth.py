"""Caches that look as if long prompts had been read: random keys and values, for timing alone.

So that a bench at 128k tokens need not compute them first. Knows the Engine's insides.
"""

from __future__ import annotations

import numpy as np
from voltapile.workers.engine import Engine
from voltapile.workers.protocol import Row


def fill_caches(engine: Engine, slot: int, pages: list[list[int]], depth: int) -> None:
    """The first `depth` positions of these pages, by way of a slot that is free before and after.

    The same values in every layer and chunk: what attention does is as long for any."""
    most = min(engine.plan.batch_tokens, depth)
    random, ops = np.random.default_rng(0), engine.ops
    made = []
    for group in engine.plan.caches:
        widths = group.kv_heads * group.key_dim, group.kv_heads * group.value_dim
        arrays = [ops.zeros((most, width), np.float32) for width in widths]
        for array, width in zip(arrays, widths, strict=True):
            ops.upload(array, random.standard_normal((most, width), np.float32))
        made.append(arrays)
    engine.caches.append(slot, pages)
    for start in range(0, depth, most):
        count = min(most, depth - start)
        row = Row(slot=slot, start=start, tokens=np.zeros(count, np.int32))
        batch = engine.buffer.fill([row])
        ops.reset_scratch()
        for layer in engine.caches.layers:
            if layer.kv is not None:
                keys, values = (array[:count] for array in made[layer.group])
                ops.store_kv(layer.kv, keys, values, batch, layer.group)
    ops.synchronize()
    engine.caches.release(slot)
