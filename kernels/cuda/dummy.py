"""Random weights made on the device, so that a model is timed that no file holds.

Values are of an ordinary size and centre on zero: a biased matrix would drive all tokens into one
direction, and what follows (experts, samplers) would behave unlike a model.
"""

from __future__ import annotations

import numpy as np
from voltapile.kernels.cuda.launch import CudaWeight, Instance, Launcher
from voltapile.shm.formats import format_of

BLOCKS = Instance("dummy.cu", "fill_blocks")
VALUES = Instance("dummy.cu", "fill_values")
INSTANCES = [BLOCKS, VALUES]

# Offsets and sizes of the float16 fields of a block; a second one cancels the codes' mean.
SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q4_0": ((0, 1e-3),),
    "Q5_0": ((0, 1e-3),),
    "Q8_0": ((0, 2e-4),),
    "IQ4_NL": ((0, 2e-4),),
    "IQ4_XS": ((0, 1e-5),),
    "Q3_K": ((108, 2e-4),),
    "Q6_K": ((208, 2e-5),),
    "Q4_K": ((0, 1e-4), (2, 7.5e-4)),
    "Q5_K": ((0, 5e-5), (2, 7.75e-4)),
    "Q2_K": ((80, 1e-3), (82, 1.5e-3)),
    "Q4_1": ((0, 1e-3), (2, -7.5e-3)),
    "Q5_1": ((0, 1e-3), (2, -15.5e-3)),
}
PLAIN = {"F32": 4, "F16": 2, "BF16": 3}
MATRIX_SIZE, THREADS = 0.02, 256


def fill(
    ops: Launcher, weight: CudaWeight, seed: int, around: tuple[float, float] | None = None
) -> None:
    """Random values in `weight`. around: what those of a format without blocks lie around, and how
    far off at most; None: a vector's are a norm's gains, others a matrix's. Raises ValueError for
    a format that has no scales here."""
    kind = format_of(weight.type_name)
    blocks = weight.nbytes // kind.block_bytes
    grid = (-(-blocks // THREADS),)
    if weight.type_name in PLAIN:
        middle, size = around or ((1.0, 0.1) if weight.is_vector else (0.0, MATRIX_SIZE))
        numbers = np.int32(PLAIN[weight.type_name]), np.float32(size), np.float32(middle)
        ops.kernel(VALUES)(grid, THREADS, (weight.ptr, np.int64(blocks), *numbers, np.uint64(seed)))
        return
    if weight.type_name not in SCALES:
        known = ", ".join([*PLAIN, *SCALES])
        raise ValueError(f"no random {weight.type_name}; there are {known}")
    (place, size), (other, other_size) = (*SCALES[weight.type_name], (-1, 0.0))[:2]
    fields = np.int32(place), np.float32(size), np.int32(other), np.float32(other_size)
    args = (weight.ptr, np.int64(blocks), np.int32(kind.block_bytes), *fields, np.uint64(seed))
    ops.kernel(BLOCKS)(grid, THREADS, args)
