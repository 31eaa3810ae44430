"""Rows of a file for whoever calls C: read in place, by one thread or several."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import numpy as np
import pytest
from voltapile.kernels.cpu import _cpu

BEFORE, ROWS, BYTES = 13, 5000, 90
CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Table:
    """A file of random rows, and a FileRows of it."""

    def __init__(self, path: Path, threads: int) -> None:
        self.values = np.random.default_rng(0).integers(0, 256, (ROWS, BYTES)).astype(np.uint8)
        path.write_bytes(bytes(BEFORE) + self.values.tobytes())
        self.path = path
        descriptor = os.open(path, os.O_RDONLY)
        self.rows = _cpu.FileRows(descriptor, BEFORE, ROWS, BYTES, threads)

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """numbers: int64; those that cannot be read become -1."""
        out = np.full((len(numbers), BYTES), 7, np.uint8)
        function, argument = self.rows.reading(numbers.ctypes.data, len(numbers), out.ctypes.data)
        CALL(function)(argument)
        return out


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 16, 256, 257, 4000])
def test_rows_come_in_the_order_of_their_numbers(tmp_path: Path, threads: int, count: int) -> None:
    table = Table(tmp_path / "table", threads)
    wanted = np.random.default_rng(1).integers(0, ROWS, count)
    wanted[: count // 3] = wanted[-1:]  # one of them often
    numbers = wanted.copy()
    np.testing.assert_array_equal(table.read(numbers), table.values[wanted])
    np.testing.assert_array_equal(numbers, wanted)
    assert table.rows.fault == 0


def test_what_the_table_has_not_is_marked(tmp_path: Path) -> None:
    table = Table(tmp_path / "table", 2)
    numbers = np.array([0, -1, ROWS, ROWS - 1, 2**62, -(2**63)])
    found = table.read(numbers)
    assert numbers.tolist() == [0, -1, -1, ROWS - 1, -1, -1]
    np.testing.assert_array_equal(found[[0, 3]], table.values[[0, -1]])
    assert table.rows.fault == 0


def test_a_file_that_was_cut_is_a_fault(tmp_path: Path) -> None:
    table = Table(tmp_path / "table", 1)
    os.truncate(table.path, BEFORE + 10 * BYTES + 1)
    numbers = np.array([9, 10, 3])
    found = table.read(numbers)
    assert numbers.tolist() == [9, -1, 3]
    np.testing.assert_array_equal(found[[0, 2]], table.values[[9, 3]])
    assert table.rows.fault == errno.ENODATA


def test_a_drive_that_fails_is_a_fault(tmp_path: Path) -> None:
    """A descriptor that gives no bytes stands for it."""
    rows = _cpu.FileRows(os.open(tmp_path, os.O_RDONLY), 0, ROWS, BYTES, 1)
    numbers, out = np.array([3, 4]), np.zeros(2 * BYTES, np.uint8)
    function, argument = rows.reading(numbers.ctypes.data, 2, out.ctypes.data)
    CALL(function)(argument)
    assert numbers.tolist() == [-1, -1]
    assert rows.fault == errno.EISDIR


def test_a_call_may_come_late(tmp_path: Path) -> None:
    """When nobody holds the rows any longer: a device may still be at work."""
    table = Table(tmp_path / "table", 1)
    numbers, out = np.array([5]), np.zeros((1, BYTES), np.uint8)
    function, argument = table.rows.reading(numbers.ctypes.data, 1, out.ctypes.data)
    del table.rows
    CALL(function)(argument)
    np.testing.assert_array_equal(out, table.values[[5]])


def test_numbers_are_read_when_the_call_comes(tmp_path: Path) -> None:
    """As a recorded step repeats it."""
    table = Table(tmp_path / "table", 1)
    numbers, out = np.array([1, 2]), np.zeros((2, BYTES), np.uint8)
    function, argument = table.rows.reading(numbers.ctypes.data, 2, out.ctypes.data)
    for wanted in ([1, 2], [4999, 0], [2, 2]):
        numbers[:] = wanted
        CALL(function)(argument)
        np.testing.assert_array_equal(out, table.values[wanted])


def test_asking_ahead_reads_nothing_and_minds_nothing(tmp_path: Path) -> None:
    table = Table(tmp_path / "table", 1)
    table.rows.expect(np.array([[0, 4999], [-1, ROWS]]))
    os.truncate(table.path, 0)
    table.rows.expect(np.arange(ROWS))
    assert table.rows.fault == 0
