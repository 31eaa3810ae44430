"""Sizes of tensor types, against the gguf package."""

from __future__ import annotations

import subprocess
import sys

import gguf
import pytest
from voltapile.shm.formats import BY_NAME, FORMATS, NVFP4_SCALED, format_of, row_bytes


def test_sizes_are_those_of_the_gguf_package() -> None:
    expected = {(int(kind), kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    found = {(each.id, each.name, each.block_len, each.block_bytes) for each in FORMATS.values()}
    assert found == expected
    assert set(BY_NAME) == {each.name for each in (*FORMATS.values(), NVFP4_SCALED)}
    assert NVFP4_SCALED.id not in FORMATS  # no file may name it


def test_row_bytes() -> None:
    assert row_bytes("F32", 7) == 28
    assert row_bytes("Q4_K", 512) == 288
    with pytest.raises(ValueError, match=r"a row of 300 values .* Q4_K's block of 256"):
        row_bytes("Q4_K", 300)


def test_unknown_type_is_named() -> None:
    with pytest.raises(ValueError, match="unknown tensor type 'Q9_X'; known: F32, F16"):
        format_of("Q9_X")


def test_does_not_import_the_gguf_package() -> None:
    code = "import sys, voltapile.shm.formats; sys.exit('gguf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
