"""An n-gram table that stays in its file: rows come between kernels, and have the bits that the
pinned table's have. Kernels run on the CPU, and the call of C is made where a device would make it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from voltapile.kernels.cuda.chunks import max_shared
from voltapile.kernels.cuda.file_table import Checked
from voltapile.kernels.families import NGramHash, ngram_numbers
from voltapile.shm.formats import row_bytes

from .emulated_families import EmulatedFamilies
from .emulation import has_compiler

pytestmark = [
    pytest.mark.skipif(not has_compiler(), reason="there is no g++"),
    pytest.mark.timeout(120),
]
ROWS, WIDTH, BEFORE = 500, 160, 77


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def ops(folder: Path) -> EmulatedFamilies:
    return EmulatedFamilies(70, folder, max_shared(70))


def table_of(path: Path, type_name: str) -> np.ndarray:
    """Random bytes of it, in a file behind something else."""
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (ROWS, row_bytes(type_name, WIDTH))).astype(np.uint8)
    path.write_bytes(bytes(BEFORE) + raw.tobytes())
    return raw


@pytest.mark.parametrize("type_name", ["IQ4_NL", "Q8_0", "Q4_0", "F16", "BF16"])
@pytest.mark.parametrize("count", [8192, 50])
def test_rows_have_the_same_bits(
    ops: EmulatedFamilies, tmp_path: Path, type_name: str, count: int
) -> None:
    """count 50: in pieces, the last of them not full."""
    raw, ops.staged = table_of(tmp_path / "model", type_name), count
    inside = ops.weight(raw.reshape(-1), type_name, (ROWS, WIDTH))
    outside = ops.file_weight(str(tmp_path / "model"), BEFORE, type_name, (ROWS, WIDTH))
    numbers = np.random.default_rng(4).integers(0, ROWS, (13, 16))
    numbers[5] = -1, ROWS, *numbers[5, 2:]
    found = [
        ops.to_host(ops.ngram_gather(table, ops.array(numbers))).view(np.uint32)
        for table in (inside, outside)
    ]
    np.testing.assert_array_equal(*found)
    assert np.isnan(found[1].view(np.float32)[5, : 2 * WIDTH]).all()


def test_no_rows(ops: EmulatedFamilies, tmp_path: Path) -> None:
    table_of(tmp_path / "model", "Q8_0")
    table = ops.file_weight(str(tmp_path / "model"), BEFORE, "Q8_0", (ROWS, WIDTH))
    found = ops.ngram_gather(table, ops.array(np.zeros((0, 16), np.int64)))
    assert found.shape == (0, 16 * WIDTH)


def test_a_row_that_cannot_be_read_ends_the_step(ops: EmulatedFamilies, tmp_path: Path) -> None:
    path = tmp_path / "model"
    raw = table_of(path, "Q8_0")
    table = ops.file_weight(str(path), BEFORE, "Q8_0", (ROWS, WIDTH))
    arrival = Checked(_There(), [table.stage])
    arrival.take()
    os.truncate(path, 1000)
    numbers = ops.array(np.array([[1, ROWS - 1]]))
    found = ops.to_host(ops.ngram_gather(table, numbers))
    assert np.isnan(found[0, WIDTH:]).all()
    whole = ops.to_host(ops.ngram_gather(ops.weight(raw, "Q8_0", (ROWS, WIDTH)), numbers))
    assert found[0, :WIDTH].tobytes() == whole[0, :WIDTH].tobytes()
    assert arrival.is_there()
    with pytest.raises(OSError, match=r"model: rows of a table cannot be read: "):
        arrival.take()


class _There:
    def is_there(self) -> bool:
        return True

    def take(self) -> list[np.ndarray]:
        return []


def test_a_file_that_is_not_there(ops: EmulatedFamilies, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="model"):
        ops.file_weight(str(tmp_path / "model"), 0, "Q8_0", (ROWS, WIDTH))


def test_a_prompts_rows_are_asked_for_ahead(
    ops: EmulatedFamilies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table_of(tmp_path / "model", "Q8_0")
    table = ops.file_weight(str(tmp_path / "model"), BEFORE, "Q8_0", (ROWS, WIDTH))
    asked: list[np.ndarray] = []
    monkeypatch.setattr(table.stage, "expect", asked.append)
    hashing = NGramHash((3, 5, 7), (97, 101), (0, 97), 7)
    tokens = np.arange(20, dtype=np.int32)
    ops.ngram_expect(table, tokens, hashing)
    np.testing.assert_array_equal(asked[0], ngram_numbers(tokens, hashing))
    ops.ngram_expect(ops.weight(bytes_of(tmp_path), "Q8_0", (ROWS, WIDTH)), tokens, hashing)
    assert len(asked) == 1


def bytes_of(folder: Path) -> np.ndarray:
    return np.frombuffer((folder / "model").read_bytes()[BEFORE:], np.uint8)


def test_asking_ahead_does_not_wait(ops: EmulatedFamilies, tmp_path: Path) -> None:
    table_of(tmp_path / "model", "Q8_0")
    table = ops.file_weight(str(tmp_path / "model"), BEFORE, "Q8_0", (ROWS, WIDTH))
    table.stage.expect(np.array([[1, -5], [2, ROWS]]))
    table.stage.expect(np.zeros((0, 4), np.int64))
    table.stage.close()
    table.stage.check()
