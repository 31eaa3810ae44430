"""The few calls of libnuma that Voltapile makes, through py-libnuma where it works.

Every function returns False where libnuma or a second node is missing, after one log line: pinning
makes a server faster, never right.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)

MPOL_BIND, MPOL_INTERLEAVE = 2, 3
WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


@functools.cache
def library() -> Any:
    """libnuma as a ctypes library, or None."""
    try:
        from numa import LIBNUMA  # type: ignore[import-untyped]

        if LIBNUMA.numa_available() >= 0:
            return LIBNUMA
        reason = "the kernel has no NUMA policy"
    except (ImportError, OSError, AttributeError, TypeError) as error:
        # py-libnuma loads libnuma.so while it is imported; TypeError: no such file
        reason = f"libnuma is missing ({error})"
    log.info("memory is not placed on CPU nodes: %s", reason)
    return None


def prefer(node: int) -> bool:
    """Allocate this process's memory on `node` while it has room."""
    lib = library()
    if lib is None or node > lib.numa_max_node():
        return False
    lib.numa_set_preferred(ctypes.c_int(node))
    return True


def place(address: int, nbytes: int, nodes: Sequence[int]) -> bool:
    """Bind pages that are not touched yet to one node, or interleave them over several."""
    lib = library()
    if lib is None or not nodes or max(nodes) > lib.numa_max_node():
        return False
    mask = (ctypes.c_ulong * (max(nodes) // WORD_BITS + 1))()
    for node in nodes:
        mask[node // WORD_BITS] |= 1 << node % WORD_BITS
    mode = MPOL_BIND if len(nodes) == 1 else MPOL_INTERLEAVE
    # The kernel reads one bit less than maxnode says.
    status = lib.mbind(
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(mode),
        mask,
        ctypes.c_ulong(len(mask) * WORD_BITS + 1),
        ctypes.c_uint(0),
    )
    if status:
        log.info("memory is not placed on CPU nodes %s: mbind refused", list(nodes))
    return not status
