"""The part of CudaOps that concerns q, k and v: what is launched at once, and what late.

Generated rows are normed, rotated and stored by attention itself, where it can. So models need not
say so, these wait here until the next call of Ops shows whether it is that. Knows neither cupy nor
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from voltapile.kernels.cuda import attention, heads
from voltapile.kernels.cuda.collectives import CudaCollectives
from voltapile.kernels.cuda.heads import RawHeads
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray
from voltapile.kernels.ops import Batch, Weight


class CudaAttention(CudaCollectives):
    """See kernels/ops.py for the meaning of every method. Before anything is launched comes
    `_catch_up`."""

    _raw: RawHeads | None = None

    def rope_store(
        self,
        q: DeviceArray,
        k: DeviceArray,
        v: DeviceArray,
        angles: DeviceArray,
        layout: str,
        cache: Any,
        batch: Batch,
        group: int,
        eps: float = 0.0,
        q_norm: Weight | None = None,
        k_norm: Weight | None = None,
    ) -> DeviceArray:
        self._catch_up()
        norms = _vector(q_norm), _vector(k_norm)
        self._raw = RawHeads(q, k, v, angles, layout, cache, batch, group, eps, norms)
        return q

    def attention(
        self,
        q: DeviceArray,
        cache: Any,
        batch: Batch,
        group: int,
        head_map: Sequence[int],
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> DeviceArray:
        ops, raw = self._launcher(), self._raw
        if (
            raw is not None
            and raw.belongs_to(q, cache, batch, group)
            and attention.takes_raw(ops, cache, batch, head_map, softcap)
        ):
            self._raw = None
        else:
            raw = None  # launched before anything else is
        return attention.attention(
            ops, q, cache, batch, group, head_map, scale, window, softcap, raw=raw
        )

    def _catch_up(self) -> None:
        """Launch what is late."""
        if self._raw is not None:
            raw, self._raw = self._raw, None
            heads.rope_store(self._launcher(), raw)
        super()._catch_up()


def _vector(weight: Weight | None) -> CudaWeight | None:
    assert weight is None or isinstance(weight, CudaWeight)
    return weight
