"""Keeps the blocks of a small launch from gathering on a few multiprocessors.

A kernel that starts early (csrc/grid.cuh) gets its places as the one before leaves them, and those
may be neighbours; shared memory that nobody uses tells how many of its blocks fit side by side.
Knows sizes; launches nothing.
"""

from __future__ import annotations

from voltapile.kernels.cuda.chunks import max_shared
from voltapile.kernels.cuda.launch import Launcher

ARCH = 90  # from which on kernels start early
MOST = 4  # blocks of a multiprocessor, from which on they are left alone
RESERVED, GRAIN = 1024, 128  # of each block beside its own; sizes are multiples of


def spread(ops: Launcher, blocks: int, own: int) -> int:
    """Bytes beside a block's `own` with which no multiprocessor takes more than its share."""
    each = -(-blocks // ops.multiprocessors)
    if ops.arch < ARCH or not 0 < each <= MOST:
        return 0
    room = max_shared(ops.arch) + RESERVED  # of a multiprocessor
    least = room // (each + 1) - RESERVED - own
    return max(0, (least // GRAIN + 1) * GRAIN)
