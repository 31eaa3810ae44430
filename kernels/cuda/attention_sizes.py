"""How large attention's blocks are, in threads and in bytes of shared memory.

Repeats what csrc/attention_*.cu(h) say; emulation notices if a kernel writes behind it. Knows
neither launches nor caches.
"""

from __future__ import annotations

from voltapile.kernels.cuda.pages import KINDS

ANY = 3  # a kernel that is told dimensions and types when it runs; slower
CLUSTERS_FROM = 90
SHARES = 8  # of a piece from there on, and blocks of a cluster (csrc/attention_rows.cuh)
STRANDS = 4  # warps of a block that share its positions (csrc/attention_join.cuh)
LETTERS = 14  # of a block's inbox (csrc/attention_blocks.cuh)


def decode_shared(dim: int, kind: int, tiles: int, arch: int, blocks: int = SHARES) -> int:
    """Bytes of struct Shared in attention_decode.cu, for blocks of such clusters."""
    rows, pitch, is_copied = 16 * tiles, dim + 8, arch >= 80 and kind != ANY
    step = 32 * pitch if not is_copied else 18 * dim if kind == KINDS["q8_0"] else 32 * dim
    stages = (1 if dim > 128 else 2) + (kind == KINDS["q8_0"])
    steps = 2 * stages if is_copied else 1
    bells = 8 * STRANDS * (steps if arch >= CLUSTERS_FROM else 1)
    ends = 32 * STRANDS * pitch
    inbox = LETTERS * (4 * dim + 8) if arch >= CLUSTERS_FROM and blocks > 1 else 16
    kept = STRANDS * tiles * 64 * (8 + dim) if arch >= CLUSTERS_FROM and blocks == 1 else 0
    own = max(STRANDS * steps * step, ends + inbox)
    return own + 2 * rows * pitch + 24 * rows + kept + bells + 96


def prefill_shared(dim: int, kind: int, arch: int) -> int:
    """Bytes of struct Shared in attention_prefill.cu."""
    tile, pitch, rows = _tile(dim), dim + 8, prefill_block(dim, kind, arch)[1]
    halves = 4 * tile * pitch if _is_async(kind, arch) else tile * pitch + 8
    return 2 * (rows * pitch + halves) + 16 * rows


def prefill_block(dim: int, kind: int, arch: int) -> tuple[int, int]:
    """Threads and rows of a block of attention_prefill."""
    if arch < 80:
        return 128, 64
    return (128 if _is_async(kind, arch) and dim <= 128 else 256), 128


def _tile(dim: int) -> int:
    return 32 if dim > 128 else 64


def _is_async(kind: int, arch: int) -> bool:
    return arch >= 80 and kind == KINDS["f16"]
