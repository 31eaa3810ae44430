"""Launchers of the product of many rows, for prompts: halves of both factors, float32 sums.

Either the library's product of halves (`ops.product`, cuBLAS) after a whole weight was unpacked, or
gemm_fused.cu, which unpacks tiles in shared memory. Sums are finished (scale, bias, residual, gate)
by a kernel of their own. Formats that are not quantised keep two halves of each activation, so that
they lose nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from voltapile.kernels.cuda.chunks import CHUNKS
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Launcher

LOWER = 2.0**-11  # what second halves are multiplied by
FUSED_ROWS, FUSED_TOKENS, FUSED_COLUMNS = 128, 64, 128
FLOATS = ("F32", "F16", "BF16")
WEIGHT_PLANES = {name: 2 if name in ("F32", "BF16") else 1 for name in CHUNKS}
_PLANES = [(name, plane) for name in CHUNKS for plane in range(WEIGHT_PLANES[name])]


def _instance(file: str, function: str, name: str, plane: int) -> Instance:
    return Instance(file, function, (("FORMAT", name), ("PLANE", str(plane))), is_exact=True)


UNPACK = {key: _instance("gemm_convert.cu", "weights_to_half", *key) for key in _PLANES}
FUSED = {
    key: _instance("gemm_fused.cu", "gemm_fused", *key)
    for key in _PLANES
    if not CHUNKS[key[0]].is_expanded
}
# By whether a unit's columns are in their natural order, which any format of the kind tells.
HALVES = {
    natural: _instance("gemm_convert.cu", "tokens_to_half", name, 0)
    for natural, name in ((True, "F16"), (False, "Q4_0"))
}
FINISH = _instance("gemm_convert.cu", "finish_sums", "F16", 0)
INSTANCES = [*UNPACK.values(), *FUSED.values(), *HALVES.values(), FINISH]


@dataclass(frozen=True)
class Halves:
    """Activations as halves in the order of units. planes: 2 with what the first halves leave."""

    units: DeviceArray  # uint16 [planes, T, K]
    scales: DeviceArray  # float32 [T]
    is_natural: bool


def fits(weights: Sequence[CudaWeight], columns: int, is_fused: bool) -> bool:
    """Whether products of many rows can be made of these."""
    names = {weight.type_name for weight in weights}
    return columns % 32 == 0 and not (is_fused and any(CHUNKS[n].is_expanded for n in names))


def scratch_bytes(tokens: int, rows: int, columns: int, is_fused: bool, is_glu: bool) -> int:
    """The most scratch that one product needs beside its result: halves, sums, a whole weight."""
    whole = 0 if is_fused else 2 * rows * columns
    return 4 * tokens * columns + 4 * tokens * rows * (1 + is_glu) + whole + 4 * tokens + 1024


def halves_of(ops: Launcher, x: DeviceArray, weights: Sequence[CudaWeight]) -> dict[bool, Halves]:
    """x for all of the weights, by the order of columns that they need."""
    found = {}
    for natural in {is_natural(weight) for weight in weights}:
        tokens, columns = x.shape
        planes = 2 if any(weight.type_name in FLOATS for weight in weights) else 1
        planes = planes if natural else 1
        units = ops.scratch((planes, tokens, columns), np.uint16)
        scales = ops.scratch((tokens,))
        ops.kernel(HALVES[natural])(
            (tokens,), 256, (x.ptr, units.ptr, scales.ptr, np.int32(columns), np.int32(planes))
        )
        found[natural] = Halves(units, scales, natural)
    return found


def is_natural(weight: CudaWeight) -> bool:
    return weight.type_name in FLOATS or CHUNKS[weight.type_name].is_expanded


def sums(
    ops: Launcher,
    x: Halves,
    weight: CudaWeight,
    is_fused: bool,
    out: DeviceArray | None = None,
) -> DeviceArray:
    """float32 [T, N], to be multiplied by x.scales."""
    out = ops.scratch((x.units.shape[1], weight.shape[0])) if out is None else out
    planes = range(WEIGHT_PLANES[weight.type_name]), range(len(x.units))
    order = [(w, a) for w, a in itertools.product(*planes) if w + a < 2]
    for plane in planes[0]:
        with ops.scope():
            whole = None if is_fused else unpacked(ops, weight, plane)
            for _, a in (pair for pair in order if pair[0] == plane):
                factor = LOWER if plane + a else 1.0
                adds = bool(plane + a)
                if whole is None:
                    _fused(ops, x.units[a], weight, plane, out, factor, adds)
                else:
                    ops.product(whole, x.units[a], out, factor, adds)
    return out


def finish(
    ops: Launcher,
    made: DeviceArray,
    scales: DeviceArray,
    out: DeviceArray,
    bias: CudaWeight | None,
    epilogue: int,
    up: DeviceArray | None = None,
    up_bias: CudaWeight | None = None,
) -> None:
    tokens, rows = out.shape
    pointers = [array.ptr if array is not None else 0 for array in (up, scales, bias, up_bias)]
    ops.kernel(FINISH)(
        (-(-rows // 256), tokens),
        256,
        (made.ptr, *pointers, out.ptr, np.int32(rows), np.int32(epilogue)),
    )


def unpacked(ops: Launcher, weight: CudaWeight, plane: int) -> DeviceArray:
    """A weight as halves, row by row."""
    rows, columns = weight.shape
    chunk = CHUNKS[weight.type_name]
    out = ops.scratch((rows, columns), np.uint16)
    span = 256 if chunk.is_expanded else 8 * chunk.span  # columns of a thread
    block = 32 if chunk.is_expanded else 128
    ops.kernel(UNPACK[weight.type_name, plane])(
        (-(-columns // span // block), min(rows, 65535)),
        block,
        (weight.ptr, out.ptr, *map(np.int32, (rows, columns, weight.is_tiled))),
    )
    return out


def _fused(
    ops: Launcher,
    units: DeviceArray,
    weight: CudaWeight,
    plane: int,
    out: DeviceArray,
    factor: float,
    adds: bool,
) -> None:
    rows, columns = weight.shape
    tokens = len(units)
    stride = 2 * FUSED_COLUMNS + (32 if ops.arch >= 75 else 16)
    ops.kernel(FUSED[weight.type_name, plane])(
        (-(-rows // FUSED_ROWS), -(-tokens // FUSED_TOKENS)),
        256,
        (
            weight.ptr,
            units.ptr,
            out.ptr,
            *map(np.int32, (rows, tokens, columns)),
            np.float32(factor),
            *map(np.int32, (adds, weight.is_tiled)),
        ),
        shared=(FUSED_ROWS + FUSED_TOKENS) * stride,
    )
