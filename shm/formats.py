"""GGUF tensor types: id, name, values per block and bytes per block.

The numbers are the `gguf` package's. Its constants file is loaded alone, because importing the
package costs 0.3 s (quantisers, tokenizers, yaml). Knows sizes only: what the bits of a block mean
is told by the headers under kernels.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Format:
    """One tensor type."""

    id: int
    name: str
    block_len: int
    block_bytes: int


def _constants() -> ModuleType:
    package = importlib.util.find_spec("gguf")
    if package is None or not package.submodule_search_locations:
        raise ImportError("the Python package 'gguf' is not installed")
    path = Path(package.submodule_search_locations[0]) / "constants.py"
    spec = importlib.util.spec_from_file_location("_voltapile_gguf_constants", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FORMATS: dict[int, Format] = {
    int(kind): Format(int(kind), kind.name, length, size)
    for kind, (length, size) in _constants().GGML_QUANT_SIZES.items()
}
# What a GPU makes of NVFP4 at load: each block begins with the factor of its tensor or expert. No
# file has it.
NVFP4_SCALED = Format(1 << 16 | 40, "NVFP4_SCALED", 64, 40)
BY_NAME: dict[str, Format] = {each.name: each for each in (*FORMATS.values(), NVFP4_SCALED)}


def format_of(type_name: str) -> Format:
    """The format called `type_name`, e.g. "Q4_K". Raises ValueError."""
    try:
        return BY_NAME[type_name]
    except KeyError:
        known = ", ".join(BY_NAME)
        raise ValueError(f"unknown tensor type {type_name!r}; known: {known}") from None


def row_bytes(type_name: str, columns: int) -> int:
    """Bytes of one row of `columns` values. Raises ValueError where blocks do not divide it."""
    kind = format_of(type_name)
    if columns % kind.block_len:
        raise ValueError(
            f"a row of {columns} values is not a multiple of {type_name}'s block of "
            f"{kind.block_len}"
        )
    return columns // kind.block_len * kind.block_bytes
