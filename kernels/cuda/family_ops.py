"""The CUDA backend with everything of kernels/families.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from voltapile.kernels.cuda import plain, sparse
from voltapile.kernels.cuda.experts import TICKETS
from voltapile.kernels.cuda.families import CudaFamilies
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray
from voltapile.kernels.cuda.matmul import Policy
from voltapile.kernels.cuda.ops import CudaOps
from voltapile.kernels.ops import Weight


class CudaFamilyOps(CudaFamilies, CudaOps):
    """See kernels/families.py."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.tickets = self.zeros((TICKETS,), np.uint32)

    def table(self, values: np.ndarray) -> DeviceArray:
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        ptr, owner = self._weights.take(raw.nbytes)
        self._uploader.send(ptr, raw)
        return DeviceArray(ptr, values.shape, values.dtype, owner)

    @property
    def prompt_policy(self) -> Policy:
        return self._policy

    def rows_alone(self, x: DeviceArray) -> int | None:
        policy = self._policy_for(x)
        return None if policy.way(len(x) - policy.generated) == "rows" else policy.generated

    def linears(
        self, x: DeviceArray, weights: Sequence[Weight], biases: Sequence[Weight | None]
    ) -> tuple[DeviceArray, ...]:
        own = [each for each in weights if isinstance(each, CudaWeight)]
        assert len(own) == len(weights), weights
        if any(bias is not None for bias in biases) or not plain.fits(own):
            return super().linears(x, weights, biases)
        alone = self.rows_alone(x)
        if alone is None or alone >= len(x):
            outs = tuple(self.scratch((len(x), each.shape[0])) for each in own)
            alone = len(x)
        else:
            outs = super().linears(x, weights, biases)
        plain.products(self, x[:alone], own, [out[:alone] for out in outs])
        return outs

    def copy_page(self, cache: Any, source: int, target: int) -> None:
        if not isinstance(cache, sparse.IndexCache):
            super().copy_page(cache, source, target)
            return
        self._catch_up()
        for array in sparse.page_parts(cache):
            self.device.copy(array[target].ptr, array[source].ptr, array[source].nbytes)
