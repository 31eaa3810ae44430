"""FamilyOps whose kernels run on the CPU, with as many Ops as whole models need."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from voltapile.kernels.cuda import experts, matmul
from voltapile.kernels.cuda.families import CudaFamilies
from voltapile.kernels.cuda.launch import DeviceArray

from .emulation import EmulatedOps


class EmulatedFamilies(CudaFamilies, EmulatedOps):
    alone: int | None = None  # see CudaFamilies' Host
    prompt_policy = matmul.EVERY_ROW_ALONE

    def table(self, values: np.ndarray) -> DeviceArray:
        return self.array(values)

    @functools.cached_property
    def tickets(self) -> DeviceArray:
        return self.zeros((experts.TICKETS,), np.uint32)

    def rows_alone(self, x: DeviceArray) -> int | None:
        return self.alone

    def upload(self, target: DeviceArray, values: np.ndarray) -> None:
        self.view(target)[...] = np.ascontiguousarray(values, target.dtype).reshape(target.shape)

    def linear(self, x: DeviceArray, weight: Any) -> DeviceArray:
        return matmul.linear(self, x, weight)

    def linears(self, x: DeviceArray, weights: Any, biases: Any) -> tuple[DeviceArray, ...]:
        return matmul.linears(self, x, weights, biases)

    def view(self, x: DeviceArray) -> np.ndarray:
        """The array itself."""
        raw = (ctypes.c_uint8 * x.nbytes).from_address(x.ptr)
        return np.frombuffer(raw, x.dtype).reshape(x.shape)
