"""Ops in CUDA: owns one GPU's stream, scratch memory and loaded kernels, and hands out launches.

What to launch is written in the launcher modules (rows, matmul, attention). Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from voltapile.kernels.cuda import attention, matmul, rows
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Kernel
from voltapile.kernels.ops import Batch, SlotState, StepOutput, Weight


class CudaOps:
    """See kernels/ops.py for the meaning of every method. (Skeleton: the calls that launcher
    modules must answer; the rest is coming.)"""

    name = "cuda"
    captures = True

    def kernel(self, instance: Instance) -> Kernel:
        raise NotImplementedError

    def scratch(self, shape: tuple[int, ...], dtype: Any = np.float32) -> DeviceArray:
        raise NotImplementedError

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        raise NotImplementedError

    def constant(self, values: np.ndarray) -> DeviceArray:
        raise NotImplementedError

    # --- attention.py -----------------------------------------------------------------------
    def kv_cache(
        self,
        pages: int,
        kv_heads: int,
        page_tokens: int,
        key_dim: int,
        value_dim: int,
        key_type: str,
        value_type: str,
    ) -> Any:
        return attention.kv_cache(
            self, pages, kv_heads, page_tokens, key_dim, value_dim, key_type, value_type
        )

    def copy_page(self, cache: Any, source: int, target: int) -> None:
        """Asynchronous copies on the stream: attention.page_parts says what (DeviceArrays)."""
        for array in attention.page_parts(cache):  # each [pages, bytes] or [pages, ...]
            self._copy(array[target], array[source])

    def store_kv(
        self, cache: Any, k: DeviceArray, v: DeviceArray, batch: Batch, group: int
    ) -> None:
        attention.store_kv(self, cache, k, v, batch, group)

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
        return attention.attention(
            self, q, cache, batch, group, head_map, scale, window, softcap
        )

    # --- matmul.py --------------------------------------------------------------------------
    def linear(
        self,
        x: DeviceArray,
        weight: CudaWeight,
        bias: CudaWeight | None = None,
        add_to: DeviceArray | None = None,
    ) -> DeviceArray:
        return matmul.linear(self, x, weight, bias, add_to)

    def linears(
        self,
        x: DeviceArray,
        weights: Sequence[CudaWeight],
        biases: Sequence[CudaWeight | None],
    ) -> tuple[DeviceArray, ...]:
        return matmul.linears(self, x, weights, biases)

    def glu(
        self,
        x: DeviceArray,
        gate: CudaWeight,
        up: CudaWeight,
        activation: str,
        gate_bias: CudaWeight | None = None,
        up_bias: CudaWeight | None = None,
    ) -> DeviceArray:
        return matmul.glu(self, x, gate, up, activation, gate_bias, up_bias)
