"""Where the logits of a token stopped being finite: the layer, for the message.

Alone, the token is computed again. Ranks of a group come here at different moments, so they must
not wait for each other, and layers with states cannot go back: there it looks at keys, values and
states that were kept. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from voltapile.kernels.ops import Array, Batch, Ops
from voltapile.kernels.positions import PositionOps
from voltapile.topology.share import Share
from voltapile.topology.spec import Spec
from voltapile.workers.batch import BatchBuffer
from voltapile.workers.caches import LayerKV
from voltapile.workers.checkpoints import Checkpoints
from voltapile.workers.models.blocks import Model, runs_of
from voltapile.workers.protocol import Row


class Search:
    """Over one rank's model. is_alone: nobody else computes with it."""

    def __init__(
        self,
        model: Model,
        layers: Sequence[LayerKV],
        buffer: BatchBuffer,
        ops: Ops,
        spec: Spec,
        share: Share,
        is_alone: bool,
        checkpoints: Checkpoints,
    ) -> None:
        self.model, self.layers, self.buffer, self.ops = model, layers, buffer, ops
        self.share, self.last, self.is_alone = share, spec.layers, is_alone
        self.checkpoints = checkpoints
        self.nothing = ops.zeros((1, max(1, len(share.head_map)) * spec.key_dim), np.float32)

    def place(self, token: int, slot: int, position: int) -> str:
        """For people. The slot's keys and values are written once more, unchanged, at most."""
        row = Row(slot=slot, start=position, tokens=np.array([token], np.int32))
        can_repeat = self.is_alone and not self.checkpoints.states
        return self._computed_again(row) if can_repeat else self._kept(row)

    def _computed_again(self, row: Row) -> str:
        """Halves the range of layers where it may have gone wrong."""
        low, high = 0, self.last + 1
        while low < high:
            middle = (low + high) // 2
            _, tapped = self.model.forward(self._batch(row), self.layers, (middle,))
            if np.isfinite(self.ops.to_host(tapped[middle])).all():
                low = middle + 1
            else:
                high = middle
        if low > self.last:
            return "in the output head"
        return f"in layer {low - 1}" if low else "in the embedding"

    def _kept(self, row: Row) -> str:
        """A query of zeros sees the mean of all values, unless a key or a value is not finite."""
        if not self.share.head_map and not self.checkpoints.states:
            return "this rank keeps no keys that would tell where"
        batch, states = self._batch(row), self.model.states()
        finite = self.checkpoints.finite(row.slot)
        for number, layer in zip(self.share.layers, self.layers, strict=True):
            own = (ok for ok, (owner, _) in zip(finite, states, strict=True) if owner == number)
            if not all(own):
                return f"first in the state of layer {number}"
            if layer.kv is None:
                continue
            with self.ops.scope():
                if not np.isfinite(self.ops.to_host(self._look(batch, layer))).all():
                    is_handed_on = number == self.share.layers[0] and not self.share.embeds
                    since = " or before" if is_handed_on else ""
                    return f"first in the keys and values of layer {number}{since}"
        what = "states, " if states else ""
        return f"after the {what}keys and values of layer {self.share.layers[-1]}"

    def _look(self, batch: Batch, layer: LayerKV) -> Array:
        """What a query of zeros sees in this rank's cache."""
        heads, runs = self.share.head_map, runs_of(self.share)
        if runs is None:
            return self.ops.attention(self.nothing, layer.kv, batch, layer.group, heads, 1.0)
        ops = cast(PositionOps, self.ops)
        here = ops.kept(batch, runs).seen
        return ops.attention_part(self.nothing, layer.kv, here, layer.group, heads, 1.0)[0]

    def _batch(self, row: Row) -> Batch:
        batch = self.buffer.fill([row])
        self.ops.reset_scratch()
        return batch
