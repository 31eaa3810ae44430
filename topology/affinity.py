"""Choose CPUs for threads, pin this process to them, and prefer the memory of a CPU node.

Memory is preferred, not bound: a model larger than one node must still load. Works through
libnuma where it is installed; without it only CPUs are pinned, and one log line says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from voltapile.shm import numa
from voltapile.topology.machine import Machine

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


def choose_cpus(machine: Machine, wanted: int, warnings: list[str]) -> tuple[int, list[int]]:
    """A node, and one CPU for each thread: its cores, other nodes' cores, then siblings."""
    home = max(machine.nodes, key=lambda node: (node.cores, node.free_bytes, -node.id))
    nodes = [home, *(node for node in machine.nodes if node is not home)]
    order = [cpu for node in nodes for cpu in node.cpus[: node.cores]]
    order += [cpu for node in nodes for cpu in node.cpus[node.cores :]]
    if not wanted:
        limit = max(1, int(machine.cpu_limit)) if machine.cpu_limit else home.cores
        return home.id, order[: min(limit, home.cores)]
    if wanted > len(order):
        warnings.append(f"-t {wanted}: this process may use {len(order)} CPUs")
    return home.id, order[:wanted]
