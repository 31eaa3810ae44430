"""Pin this process to CPUs, and prefer the memory of a CPU node.

Memory is preferred, not bound: a model larger than one node must still load. Works through
libnuma where it is installed; without it only CPUs are pinned, and one log line says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from voltapile.shm import numa

log = logging.getLogger(__name__)


def pin(cpus: Sequence[int], node: int = -1) -> bool:
    """Keep all later threads of this process on `cpus` and its memory near `node` (-1: anywhere).

    Returns False where the system refused the CPUs; the process then runs wherever it may.
    """
    pinned = True
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            log.warning("cannot pin to CPUs %s: %s", list(cpus), error.strerror)
            pinned = False
    if node >= 0:
        numa.prefer(node)
    return pinned
