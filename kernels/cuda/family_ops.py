"""The CUDA backend with everything of kernels/families.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from voltapile.kernels.cuda import expert_stream, plain, sparse
from voltapile.kernels.cuda.device import Pinned
from voltapile.kernels.cuda.expert_table import ExpertTable
from voltapile.kernels.cuda.experts import TICKETS
from voltapile.kernels.cuda.families import CudaFamilies, shared_of
from voltapile.kernels.cuda.file_table import NUMBER, ROWS, Checked, FileTable, Stage
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray
from voltapile.kernels.cuda.matmul import Policy
from voltapile.kernels.cuda.ops import SLACK, CudaOps
from voltapile.kernels.cuda.states import Porter
from voltapile.kernels.families import SharedExpert
from voltapile.kernels.ops import Arrival, Weight
from voltapile.shm.formats import row_bytes


class CudaFamilyOps(CudaFamilies, CudaOps):
    """See kernels/families.py."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.tickets = self.zeros((TICKETS,), np.uint32)
        self.porter, self._pinned = Porter(self), list[Pinned]()
        self._stages: list[Stage] = []

    def _catch_up(self) -> None:
        super()._catch_up()
        self.add_to_streams()

    def table(self, values: np.ndarray) -> DeviceArray:
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        ptr, owner = self._weights.take(raw.nbytes)
        self._uploader.send(ptr, raw)
        return DeviceArray(ptr, values.shape, values.dtype, owner)

    def file_weight(
        self, path: str, offset: int, type_name: str, shape: tuple[int, ...]
    ) -> FileTable:
        """A matrix whose rows are read from the file as steps ask for them. Raises OSError."""
        rows, row = shape[0], row_bytes(type_name, shape[1])
        buffers = Pinned(ROWS * NUMBER), Pinned(ROWS * row + SLACK)
        stage = Stage(path, offset, rows, row, buffers)
        self._stages.append(stage)
        return FileTable(tuple(shape), rows * row, type_name, 0, row, stage=stage)

    def close(self) -> None:
        """End the threads that read a file; nothing is computed afterwards."""
        for stage in self._stages:
            stage.close()

    def read_rows(self, table: FileTable, numbers: DeviceArray) -> None:
        self._catch_up()
        if not self._loader.is_rehearsing:
            self.device.fetch(table.stage.numbers.ptr, numbers.ptr, numbers.nbytes)
            self.device.call(*table.stage.reading(numbers.size))

    def fetch(self, arrays: Sequence[DeviceArray]) -> Arrival:
        arrival = super().fetch(arrays)
        return Checked(arrival, self._stages) if self._stages else arrival

    def pinned(self, nbytes: int) -> np.ndarray:
        self._pinned.append(Pinned(nbytes))
        return self._pinned[-1].bytes

    @property
    def prompt_policy(self) -> Policy:
        return self._policy

    def rows_alone(self, x: DeviceArray) -> int | None:
        policy = self._policy_for(x)
        return None if policy.way(len(x) - policy.generated) == "rows" else policy.generated

    def experts(
        self,
        x: DeviceArray,
        routing: tuple[DeviceArray, DeviceArray],
        table: ExpertTable,
        add_to: DeviceArray | None = None,
        shared: SharedExpert | None = None,
    ) -> DeviceArray:
        is_few = 0 < len(x) <= expert_stream.FEW
        if add_to is None and is_few and self._goes_by_tails((len(x), x.shape[1])):
            out = self.scratch(x.shape)
            end = expert_stream.begun(self, x, routing, table, shared_of(shared))
            if end is not None:
                return self._ends_late(out, end)
        self._changes(add_to, x)
        return super().experts(x, routing, table, add_to, shared)

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
