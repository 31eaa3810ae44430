"""What blocks of kernels of chosen experts hold, from sm_80 on: csrc/expert_{strip,tokens}.cuh.

How many tokens a block takes and how long a warp's ring is. Nothing here changes bits. Knows sizes
alone.
"""

from __future__ import annotations

from collections.abc import Callable

from voltapile.kernels.cuda.chunks import CHUNKS, max_shared
from voltapile.shm.formats import row_bytes

MOST_TOKENS = 4  # of a block
# Bytes of a token's chunk in whole numbers: csrc/expert_tokens.cuh.
SLOTS = {"Q4_K": 576, "Q5_K": 576, "Q6_K": 576, "Q5_1": 576, "Q8_0": 576}
DEPTHS = range(2, 7)  # of a ring: csrc/expert_strip.cuh
BEHIND = 112  # csrc/expert_down_stream.cu


def room_for(nbytes: Callable[[int], int], tokens: int, arch: int) -> int:
    """Tokens of a block."""
    room = min(tokens, MOST_TOKENS)
    while room > 1 and nbytes(room) > max_shared(arch):
        room -= 1
    return room


def strip_bytes(
    name: str, columns: int, room: int, tiles: int, warps: int, ring: int, least: int = 0
) -> int:
    """Of csrc/expert_strip.cuh: bells, rings; tokens and sums, at least so many bytes."""
    count = chunks(columns)
    rings = warps * depth_of(name, ring) * 16 * CHUNKS[name].bytes
    rest = count * room * (SLOTS[name] + 64 * tiles)
    return whole(8 * warps * DEPTHS[-1]) + rings + max(least, rest)


def tile_bytes(name: str, columns: int) -> int:
    """Of 16 rows in csrc/expert_down_stream.cu, with what is read behind them for nothing."""
    return 16 * row_bytes(name, columns) + BEHIND * (columns % 128 > 0)


def depth_of(name: str, ring: int) -> int:
    """Chunks of a warp's ring."""
    return max(DEPTHS[0], min(DEPTHS[-1], ring // (16 * CHUNKS[name].bytes)))


def chunks(columns: int) -> int:
    return groups(columns, 256)


def whole(nbytes: int) -> int:
    return -(-nbytes // 128) * 128


def groups(items: int, size: int) -> int:
    return -(-items // size)
