"""FamilyOps whose kernels run on the CPU, with as many Ops as whole models need."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from voltapile.kernels.cuda import experts, matmul
from voltapile.kernels.cuda.families import CudaFamilies
from voltapile.kernels.cuda.file_table import NUMBER, FileTable, Stage
from voltapile.kernels.cuda.launch import DeviceArray, Instance, Kernel
from voltapile.kernels.cuda.states import Porter
from voltapile.shm.formats import row_bytes

from .emulation import EmulatedOps


class EmulatedFamilies(CudaFamilies, EmulatedOps):
    alone: int | None = None  # see CudaFamilies' Host
    staged = 8192  # rows of a table in a file that are read at once
    prompt_policy = matmul.EVERY_ROW_ALONE

    def kernel(self, instance: Instance) -> Kernel:
        self.add_to_streams()
        return super().kernel(instance)

    def to_host(self, x: DeviceArray) -> np.ndarray:
        self.add_to_streams()
        return super().to_host(x)

    def table(self, values: np.ndarray) -> DeviceArray:
        return self.array(values)

    @functools.cached_property
    def tickets(self) -> DeviceArray:
        return self.zeros((experts.TICKETS,), np.uint32)

    @functools.cached_property
    def porter(self) -> Porter:
        return Porter(self)

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def rows_alone(self, x: DeviceArray) -> int | None:
        return self.alone

    def upload(self, target: DeviceArray, values: np.ndarray) -> None:
        self.view(target)[...] = np.ascontiguousarray(values, target.dtype).reshape(target.shape)

    def file_weight(self, path: str, offset: int, type_name: str, shape: Any) -> FileTable:
        row, count = row_bytes(type_name, shape[1]), self.staged
        buffers = self.zeros((count * NUMBER,), np.uint8), self.zeros((count, row), np.uint8)
        stage = Stage(path, offset, shape[0], row, buffers, count)
        return FileTable(tuple(shape), shape[0] * row, type_name, 0, row, stage=stage)

    def read_rows(self, table: FileTable, numbers: DeviceArray) -> None:
        self.view(table.stage.numbers)[: len(numbers)] = self.to_host(numbers)
        function, argument = table.stage.reading(numbers.size)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)

    def linear(self, x: DeviceArray, weight: Any) -> DeviceArray:
        return matmul.linear(self, x, weight)

    def linears(self, x: DeviceArray, weights: Any, biases: Any) -> tuple[DeviceArray, ...]:
        return matmul.linears(self, x, weights, biases)

    def view(self, x: DeviceArray) -> np.ndarray:
        """The array itself."""
        raw = (ctypes.c_uint8 * x.nbytes).from_address(x.ptr)
        return np.frombuffer(raw, x.dtype).reshape(x.shape)
