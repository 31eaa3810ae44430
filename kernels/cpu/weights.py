"""Tensors in the CPU backend's form: a matrix as the file has it, or a small one in float32.

Knows formats; neither commands nor scratch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from voltapile.kernels.cpu import _cpu
from voltapile.kernels.ops import Weight


@dataclass(eq=False)
class CpuWeight:
    """A matrix in the form of the file, or a vector in float32."""

    shape: tuple[int, ...]
    nbytes: int
    matrix: _cpu.Matrix | None = None
    vector: np.ndarray | None = None
    data: np.ndarray | None = None  # the matrix's bytes
    kind: int = 0  # its GGUF type
    factors: np.ndarray | None = None  # of the matrix, or of each expert
    small: dict[str, np.ndarray] = field(default_factory=dict)  # what flat and turned have made


def unpack(data: np.ndarray, kind: int, n: int) -> np.ndarray:
    """float32[n] of raw bytes, by the scalar definition of the format."""
    out = np.empty(n, np.float32)
    _cpu.unpack_to(kind, data.reshape(-1), out)
    return out


def matrix_of(weight: Weight) -> _cpu.Matrix:
    assert isinstance(weight, CpuWeight)
    assert weight.matrix is not None, "a vector where a matrix is needed"
    return weight.matrix


def vector_of(weight: Weight) -> np.ndarray:
    assert isinstance(weight, CpuWeight)
    assert weight.vector is not None, "a matrix where a vector is needed"
    return weight.vector


def bias_of(bias: Weight | None, weight: Weight) -> np.ndarray | None:
    if bias is None:
        return None
    assert bias.shape == weight.shape[:1], (bias.shape, weight.shape)
    return vector_of(bias)


def flat(weight: Weight) -> np.ndarray:
    """float32 values of a small tensor, whatever its shape, one behind another."""
    assert isinstance(weight, CpuWeight)
    if weight.vector is not None:
        return weight.vector
    if "flat" not in weight.small:
        assert weight.data is not None
        count = int(np.prod(weight.shape, dtype=np.int64))
        values = unpack(weight.data, weight.kind, count)
        if weight.factors is not None:
            values = (values.reshape(len(weight.factors), -1) * weight.factors[:, None]).reshape(-1)
        weight.small["flat"] = values
    return weight.small["flat"]


def turned(weight: Weight) -> np.ndarray:
    """A small matrix with its axes exchanged, in float32."""
    assert isinstance(weight, CpuWeight)
    if "turned" not in weight.small:
        columns = flat(weight).reshape(weight.shape).T
        weight.small["turned"] = np.ascontiguousarray(columns)
    return weight.small["turned"]
