"""Launcher of experts for many tokens: sorted by expert on the device, products of whole tiles.

Prompt rows alone take it, for it changes bits. Takes a Launcher and device arrays; knows neither
cupy nor models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from voltapile.kernels.cuda import gemm
from voltapile.kernels.cuda.chunks import CHUNKS, Chunk
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Launcher
from voltapile.kernels.cuda.tiles import FORMATS as TILED
from voltapile.shm.formats import format_of

ROWS, TOKENS = gemm.FUSED_ROWS, gemm.FUSED_TOKENS  # of a tile before sm_80
MOST_EXPERTS = 1024
MOST_PAIRS = 32768  # sorted at once: no more tiles than a grid's second axis has
FROM = 16  # tokens; fewer are better off one by one
WARPS, BATCH = 8, 128  # of a block from sm_80 on; tokens of a warp that has one tile of 16 rows
FEW = 48  # tokens of an expert, on average, for which two tiles of rows are better
STATIC = 2048  # bytes of shared memory that a block has beside those it is given
ROOMY = 9, 10  # major versions whose multiprocessors have 228 KiB of shared memory
HALF = 113 << 10  # bytes that each of two blocks may take there


def _pitch(chunk: Chunk) -> int:
    """Bytes of a row's stage that begins anywhere in 16 bytes, of expert_batch.cuh's Stages. An
    odd number of 16, so that rows meet distinct banks, but where most lie by tiles."""
    is_large = format_of(chunk.name).block_len == 256
    size = chunk.bytes if is_large else chunk.bytes // 2
    pieces = -(-(size + max(0, 16 - chunk.align)) // 16)
    return 16 * (pieces if chunk.name in TILED and is_large else pieces | 1)


def _shared_of(chunk: Chunk, tiles: int) -> int:
    """Of two stages of all warps, and two steps of 64 columns of tokens."""
    return 2 * (16 * tiles * WARPS * _pitch(chunk) + BATCH // tiles * 128)


def _instance(function: str, name: str, tiles: int) -> Instance:
    sizes = {"PLANE": 0, "TILES": tiles, "PITCH": _pitch(CHUNKS[name])}
    defines = ("FORMAT", name), *((key, str(value)) for key, value in sizes.items())
    return Instance("expert_group.cu", function, defines, is_exact=True, waits=True)


FORMATS = [
    name for name, chunk in CHUNKS.items() if name not in gemm.FLOATS and not chunk.is_expanded
]
_KINDS = [
    (name, tiles)
    for name in FORMATS
    for tiles in (1, 2)
    if tiles == 1 or _shared_of(CHUNKS[name], tiles) + STATIC <= HALF
]
GROUP_UP = {kind: _instance("expert_group_up", *kind) for kind in _KINDS}
GROUP_DOWN = {kind: _instance("expert_group_down", *kind) for kind in _KINDS}
PLAN, JOIN = (_instance(f"expert_{name}", "Q4_0", 1) for name in ("plan", "join"))
INSTANCES = [*GROUP_UP.values(), *GROUP_DOWN.values(), PLAN, JOIN]


def fits(weights: Sequence[CudaWeight], tokens: int) -> bool:
    """gate, up, down."""
    gate, up, _ = weights
    return (
        tokens >= FROM
        and gate.type_name == up.type_name
        and gate.shape[0] <= MOST_EXPERTS
        and all(each.type_name in FORMATS and each.shape[2] % 32 == 0 for each in weights)
    )


def experts(
    ops: Launcher,
    x: DeviceArray,
    routing: tuple[DeviceArray, DeviceArray],
    weights: Sequence[CudaWeight],
    places: DeviceArray,
    first: int,
    out: DeviceArray,
    adds: bool,
) -> None:
    """places: of the experts in the table, of which `first` is the first."""
    step = MOST_PAIRS // routing[0].shape[1]
    for start in range(0, len(x), step):
        stop = min(len(x), start + step)
        part = routing[0][start:stop], routing[1][start:stop]
        with ops.scope():
            _grouped(ops, x[start:stop], part, weights, (places, first), out[start:stop], adds)


def _grouped(
    ops: Launcher,
    x: DeviceArray,
    routing: tuple[DeviceArray, DeviceArray],
    weights: Sequence[CudaWeight],
    table: tuple[DeviceArray, int],
    out: DeviceArray,
    adds: bool,
) -> None:
    (gate, _, down), (chosen, _), (places, first) = weights, routing, table
    used, (count, inner_width, width) = chosen.shape[1], gate.shape
    pairs, own = chosen.size, (np.int32(count), np.int32(first))
    is_few = ops.arch // 10 in ROOMY and pairs <= FEW * count
    batch = TOKENS if is_few or ops.arch < 80 else BATCH
    most = -(-pairs // batch) + min(count, pairs)
    order, tiles = ops.scratch((pairs,), np.int32), ops.scratch((most, 3), np.int32)
    limits = np.int32(pairs), *own, np.int32(most), np.int32(batch)
    ops.kernel(PLAN)((1,), 1024, (chosen.ptr, order.ptr, tiles.ptr, *limits))
    parts, where = ops.scratch((pairs, width)), (places, tiles, order)
    with ops.scope():
        inner = ops.scratch((pairs, inner_width))
        sizes = used, inner_width, width
        _multiply(ops, GROUP_UP, gate, x, where, inner, 2 * inner_width, sizes, is_few)
        _multiply(ops, GROUP_DOWN, down, inner, where, parts, width, (width, inner_width), is_few)
    join(ops, routing, parts, None, out, own, adds)


def _multiply(
    ops: Launcher,
    instances: Mapping[tuple[str, int], Instance],
    weight: CudaWeight,
    x: DeviceArray,
    where: tuple[DeviceArray, DeviceArray, DeviceArray],
    out: DeviceArray,
    rows: int,
    sizes: tuple[int, ...],
    is_few: bool,
) -> None:
    """A product with every tile's expert. where: the experts' places, tiles, pairs in order. rows:
    of an expert's matrices that are taken together. is_few: tiles have no more than TOKENS."""
    name = weight.type_name
    kind = name, 2 if is_few and (name, 2) in instances else 1
    grid = -(-rows // _rows(ops, kind[1])), len(where[1])
    with ops.scope():
        halves = gemm.halves_of(ops, x, [weight])[False]
        arrays = *where, halves.units, halves.scales, out
        numbers = map(np.int32, (*sizes, weight.is_tiled))
        ops.kernel(instances[kind])(
            grid, 256, (*(each.ptr for each in arrays), *numbers), shared=_shared(ops, *kind)
        )


def _rows(ops: Launcher, tiles: int) -> int:
    """Of a block."""
    return ROWS if ops.arch < 80 else 16 * WARPS * tiles


def _shared(ops: Launcher, name: str, tiles: int) -> int:
    if ops.arch >= 80:
        return _shared_of(CHUNKS[name], tiles)
    stride = 2 * gemm.FUSED_COLUMNS + (32 if ops.arch >= 75 else 16)
    return (ROWS + TOKENS) * stride


def join(
    ops: Launcher,
    routing: tuple[DeviceArray, DeviceArray],
    parts: DeviceArray,
    other: DeviceArray | None,
    out: DeviceArray,
    table: tuple[np.int32, np.int32],
    adds: bool,
) -> None:
    """out (+)= the weighted sum of a token's pairs of parts, and `other`. table: how many experts
    are here, and which is the first."""
    (chosen, shares), (tokens, width) = routing, out.shape
    pointers = chosen.ptr, shares.ptr, parts.ptr, 0 if other is None else other.ptr, out.ptr
    sizes = np.int32(chosen.shape[1]), np.int32(width), *table, np.int32(adds)
    ops.kernel(JOIN)((-(-width // 256), tokens), 256, (*pointers, *sizes))
