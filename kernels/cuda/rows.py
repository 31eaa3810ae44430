"""Launchers of what works row by row: embedding, norms, rope, soft caps, gather.

Takes a Launcher and device arrays; knows neither cupy nor models.
"""

from __future__ import annotations

import re

import numpy as np
from voltapile.kernels.cuda.chunks import REPACKED
from voltapile.kernels.cuda.compile import KERNELS
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Launcher
from voltapile.shm.formats import format_of

# Every format that has a header.
FORMATS: tuple[str, ...] = tuple(
    re.findall(r"\bX\((\w+)\)", (KERNELS / "formats/registry.h").read_text())
)
# The first kernels of a step wait for all that was before it, so that later ones may read
# positions, page tables, angles and older keys and values as soon as they start.
EMBED = {
    name: Instance("embed.cu", "embed", (("FORMAT", name),), True)
    for name in (*(each for each in FORMATS if each not in REPACKED), *REPACKED.values())
}
NORM_ROWS = Instance("norm.cu", "rms_norm_rows", (("HELD", "2"),), waits=True)
NORM_LONG = Instance("norm.cu", "rms_norm_rows", (("HELD", "4"),), waits=True)
NORM_HEADS = Instance("norm.cu", "rms_norm_heads", (("HELD", "2"),), waits=True)
ANGLES = Instance("rope.cu", "rope_angles", (), True)
ROTATE = Instance("rope.cu", "rope_rotate", (), True)
SOFTCAP = Instance("elementwise.cu", "softcap", waits=True)
GATHER = Instance("elementwise.cu", "gather", waits=True)
INSTANCES = [*EMBED.values(), NORM_ROWS, NORM_LONG, NORM_HEADS, ANGLES, ROTATE, SOFTCAP, GATHER]

LONGEST_HEAD = 512  # runs that one warp norms
LONGEST_ROW = 16 * 1024  # that a block's registers hold
EMBEDDED = 1024  # values of a row that a block of embed makes
BY_VALUE = ("Q8_0", "Q4_K", "Q6_K")  # a thread each
MAX_ROWS = 65535  # a grid's limit on its second axis


def embed(ops: Launcher, table: CudaWeight, tokens: DeviceArray, scale: float = 1.0) -> DeviceArray:
    vocab, width = table.shape
    blocks = width // format_of(table.type_name).block_len
    out = ops.scratch((len(tokens), width))
    assert len(tokens) <= MAX_ROWS, len(tokens)
    ops.kernel(EMBED[table.type_name])(
        (_groups(blocks, max(1, EMBEDDED // (width // blocks))), len(tokens)),
        EMBEDDED if table.type_name in BY_VALUE else 128,
        (
            *(table.ptr, tokens.ptr, out.ptr, np.int32(vocab), np.int32(blocks)),
            *(np.float32(scale), np.int32(table.is_tiled)),
        ),
    )
    return out


def rms_norm(
    ops: Launcher,
    x: DeviceArray,
    weight: CudaWeight,
    eps: float,
    add_to: DeviceArray | None = None,
    out: DeviceArray | None = None,
) -> DeviceArray:
    """out: where it goes, if there is a place for it."""
    n = weight.shape[0]
    assert x.shape[-1] % n == 0, (x.shape, weight.shape)
    assert add_to is None or add_to.shape == x.shape, (add_to, x)
    if out is None:
        out = ops.scratch(x.shape) if add_to is None else add_to
    runs = x.size // n
    if runs == 0:
        return out
    numbers = np.int32(n), np.float32(eps), np.int32(add_to is not None)
    pointers = x.ptr, weight.ptr, out.ptr
    kernel = ops.kernel(norm_instance(n))
    if n <= LONGEST_HEAD:
        kernel((_groups(runs, 4),), 128, (*pointers, *numbers, np.int32(runs)))
    else:
        assert n <= LONGEST_ROW or n % 4, n
        kernel((runs,), norm_threads(n), (*pointers, *numbers))
    return out


def norm_instance(n: int) -> Instance:
    if n <= LONGEST_HEAD:
        return NORM_HEADS
    return NORM_LONG if n > 8 * norm_threads(n) else NORM_ROWS


def norm_threads(n: int) -> int:
    """A power of two with about eight values each."""
    return int(min(1024, max(128, 1 << (n // 8 - 1).bit_length())))


def rope_angles(
    ops: Launcher, positions: DeviceArray, inv_freq: np.ndarray, scale: float
) -> DeviceArray:
    frequencies = ops.constant(np.asarray(inv_freq, np.float32))
    pairs = len(frequencies)
    out = ops.scratch((len(positions), pairs, 2))
    assert len(positions) <= MAX_ROWS, len(positions)
    ops.kernel(ANGLES)(
        (_groups(pairs, 32), len(positions)),
        32,
        (positions.ptr, frequencies.ptr, out.ptr, np.int32(pairs), np.float32(scale)),
    )
    return out


def rope_(
    ops: Launcher, x: DeviceArray, angles: DeviceArray, head_dim: int, layout: str
) -> DeviceArray:
    assert layout in ("norm", "neox"), layout
    assert len(x) == len(angles), (x, angles)
    heads, pairs = x.size // max(1, len(x)) // head_dim, angles.shape[1]
    assert x.size == len(x) * heads * head_dim, (x, head_dim)
    assert 2 * pairs <= head_dim, (angles, head_dim)
    ops.kernel(ROTATE)(
        (_groups(heads * pairs, 128), len(x)),
        128,
        (
            x.ptr,
            angles.ptr,
            np.int32(heads),
            np.int32(head_dim),
            np.int32(pairs),
            np.int32(1 if layout == "norm" else pairs),
        ),
    )
    return x


def softcap_(ops: Launcher, x: DeviceArray, cap: float) -> DeviceArray:
    assert cap > 0, cap
    ops.kernel(SOFTCAP)((_groups(x.size, 256),), 256, (x.ptr, np.int64(x.size), np.float32(cap)))
    return x


def gather(ops: Launcher, x: DeviceArray, index: DeviceArray) -> DeviceArray:
    out = ops.scratch((len(index), *x.shape[1:]), x.dtype)
    width = x.nbytes // max(1, len(x)) // 4
    if not len(index):
        return out
    ops.kernel(GATHER)(
        (_groups(width, 256), len(index)), 256, (x.ptr, index.ptr, out.ptr, np.int32(width))
    )
    return out


def vector(data: np.ndarray, type_name: str) -> np.ndarray:
    """float32 values of the raw bytes of a vector."""
    if type_name == "F32":
        return data.view(np.float32)
    if type_name == "F16":
        return data.view(np.float16).astype(np.float32)
    import gguf  # slow, and vectors are seldom anything else

    kind = gguf.GGMLQuantizationType[type_name]
    return np.asarray(gguf.quants.dequantize(data, kind), np.float32)


def _groups(items: int, size: int) -> int:
    return -(-items // size)
