"""A matrix that stays in its file: rows come to page-locked memory as a step asks for them.

In the order of the step's kernels, numbers of rows are copied there, a thread of the driver's reads
those rows beside them (kernels/cpu/csrc/file_rows.h), and kernels read what it has read. So a
recorded step stays as it is, and one buffer serves all steps: they use it one after another. Knows
neither cupy nor what the rows mean.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from voltapile.kernels.cpu import _cpu
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Launcher
from voltapile.kernels.ops import Arrival

ROWS = 8192  # that are read at once; the Plan counts their bytes
THREADS = 8  # at most, for a prompt's rows
NUMBER = 8  # bytes


class Buffer(Protocol):
    """Memory that the host and kernels see at one address."""

    ptr: int


class Stage:
    """Where rows arrive: `count` numbers, and as many rows. Numbers of rows that could not be read
    are -1 there."""

    def __init__(
        self, path: str, offset: int, rows: int, row_bytes: int, buffers: tuple[Buffer, Buffer],
        count: int = ROWS,
    ) -> None:  # fmt: skip
        """path, offset: where the matrix lies. Raises OSError."""
        self.path, self.count = path, count
        numbers, data = buffers
        self.numbers = DeviceArray(numbers.ptr, (count,), np.int64, numbers)
        self.data = DeviceArray(data.ptr, (count, row_bytes), np.uint8, data)
        threads = min(THREADS, len(os.sched_getaffinity(0)))
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._file = _cpu.FileRows(descriptor, offset, rows, row_bytes, threads)
        self._readings: dict[int, tuple[int, int]] = {}
        self._ahead = ThreadPoolExecutor(1, "rows ahead")

    def reading(self, count: int) -> tuple[int, int]:
        """Function and argument of a call in C that reads the first `count` rows."""
        if count not in self._readings:
            places = self.numbers.ptr, count, self.data.ptr
            self._readings[count] = self._file.reading(*places)
        return self._readings[count]

    def expect(self, numbers: np.ndarray) -> None:
        """Rows that will be read soon; returns at once."""
        self._ahead.submit(self._file.expect, np.ascontiguousarray(numbers, np.int64).reshape(-1))

    def close(self) -> None:
        """End the thread that asks ahead."""
        self._ahead.shutdown()

    def check(self) -> None:
        """Raises OSError if a row could not be read."""
        if fault := self._file.fault:
            raise OSError(f"{self.path}: rows of a table cannot be read: {os.strerror(fault)}")


@dataclass(eq=False, kw_only=True)
class FileTable(CudaWeight):
    """Has no address of its own."""

    stage: Stage


class RowReader(Launcher, Protocol):
    """Whose kernels get rows of a FileTable."""

    def read_rows(self, table: FileTable, numbers: DeviceArray) -> None:
        """In order with kernels: numbers [n] int64 and their rows to the table's stage."""


class Checked:
    """An Arrival that tells if rows could not be read meanwhile."""

    def __init__(self, arrival: Arrival, stages: list[Stage]) -> None:
        self._arrival, self._stages = arrival, stages

    def is_there(self) -> bool:
        return self._arrival.is_there()

    def take(self) -> list[np.ndarray]:
        found = self._arrival.take()
        for stage in self._stages:
            stage.check()
        return found
