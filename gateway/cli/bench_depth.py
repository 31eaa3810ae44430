"""Caches that look as if long prompts had been read: random keys, values and keys of blocks, for
timing alone. States of delta nets are a new slot's, which take as long.

So that a bench at 128k tokens need not compute them first. Knows the Engine's insides.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from voltapile.kernels.ops import Array
from voltapile.workers.engine import Engine
from voltapile.workers.models.blocks import Decoder
from voltapile.workers.models.qwen4exp import SparseAttention
from voltapile.workers.protocol import Row


def fill_caches(engine: Engine, slot: int, pages: list[list[int]], depth: int) -> None:
    """The first `depth` positions of these pages, by way of a slot that is free before and after.

    The same values in every layer and chunk: what attention does is as long for any."""
    most = min(engine.plan.batch_tokens, depth)
    random, ops = np.random.default_rng(0), engine.ops

    def made(width: int) -> Array:
        array = ops.zeros((most, width), np.float32)
        ops.upload(array, random.standard_normal((most, width), np.float32))
        return array

    groups = [
        (made(group.kv_heads * group.key_dim), made(group.kv_heads * group.value_dim))
        for group in engine.plan.caches
    ]
    blocks = cast(Decoder, engine.model).blk.values()
    mixers = [getattr(block, "mixer", None) for block in blocks]
    choosing = [mixer for mixer in mixers if isinstance(mixer, SparseAttention)]
    index_keys = made(choosing[0].k_norm.shape[0]) if choosing else None
    engine.caches.append(slot, pages)
    for start in range(0, depth, most):
        count = min(most, depth - start)
        row = Row(slot=slot, start=start, tokens=np.zeros(count, np.int32))
        batch = engine.buffer.fill([row])
        for layer, mixer in zip(engine.caches.layers, mixers, strict=True):
            ops.reset_scratch()
            if layer.kv is not None:
                keys, values = (array[:count] for array in groups[layer.group])
                ops.store_kv(layer.kv, keys, values, batch, layer.group)
            if index_keys is not None and isinstance(mixer, SparseAttention):
                where, rope = (batch, layer.group), mixer.frequencies
                keys = index_keys[:count]
                mixer.family.index_store(layer.index, keys, mixer.k_norm, rope, *where, mixer.eps)
    ops.synchronize()
    engine.caches.release(slot)
