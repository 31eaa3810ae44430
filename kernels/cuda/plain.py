"""Launcher of products with small matrices that are not quantised: csrc/plain_rows.cu.

For few tokens; the engine of matmul.py expands such formats, and gives few rows to few blocks.
Takes a Launcher and device arrays; knows neither cupy nor models.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Launcher

TYPES = ("F32", "F16", "BF16")
ROWS, TOKENS, EIGHT = 5, 8, 8  # as in the source
MATRICES = 3
MOST_ROWS = 1024  # of all matrices: more of them are better off with tensor cores
MOST_COLUMNS = 512 * EIGHT
PLAIN = {
    name: Instance(
        "plain_rows.cu", "plain_rows", (("FORMAT", name), ("ROWS", str(ROWS))), waits=True
    )
    for name in TYPES
}
INSTANCES = list(PLAIN.values())


def fits(weights: Sequence[CudaWeight]) -> bool:
    """Whether the kernel takes these matrices; it does not depend on tokens."""
    name, (_, columns) = weights[0].type_name, weights[0].shape
    return (
        {each.type_name for each in weights} == {name} <= set(TYPES)
        and len(weights) <= MATRICES
        and columns % EIGHT == 0
        and columns <= MOST_COLUMNS
        and sum(each.shape[0] for each in weights) <= MOST_ROWS
    )


def products(
    ops: Launcher, x: DeviceArray, weights: Sequence[CudaWeight], outs: Sequence[DeviceArray]
) -> None:
    """outs: [T, N] of each. Every row has the bits that it has alone."""
    tokens, columns = x.shape
    args: list[int | np.int32] = []
    for weight, out in zip(weights, outs, strict=True):
        assert weight.shape[1] == columns, (x, weight.shape)
        assert out.shape == (tokens, weight.shape[0]), (out, weight.shape)
        args += [weight.ptr, out.ptr, np.int32(weight.shape[0])]
    args += [0, 0, np.int32(0)] * (MATRICES - len(weights))
    rows = sum(weight.shape[0] for weight in weights)
    if tokens:
        ops.kernel(PLAIN[weights[0].type_name])(
            (-(-rows // ROWS), -(-tokens // TOKENS)),
            32 * -(-columns // (32 * EIGHT)),
            (x.ptr, *args, np.int32(tokens), np.int32(columns)),
        )
