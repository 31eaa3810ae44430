"""Choose CPUs for threads, pin this process to their node, and keep its memory there.

Memory is preferred, not bound to one node: a model larger than it must still load. But nothing may
lie on nodes without CPUs, which are the memory of GPUs. Works through libnuma where it is
installed; without it only CPUs are pinned, and one log line says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from voltapile.shm import numa
from voltapile.topology.machine import Machine

log = logging.getLogger(__name__)


def pin(cpus: Sequence[int], node: int = -1) -> bool:
    """Keep all later threads of this process near `cpus` and `node` (-1: just the CPUs), and its
    memory near the node.

    Threads that compute pin themselves to one of `cpus` each. The others, which only help, may run
    on all CPUs of the node that this process had: where they inherited a single one, they would
    wait for the one that computes there. Returns False where the system refused; the process then
    runs wherever it may.
    """
    before, pinned = os.sched_getaffinity(0), True
    if cpus:
        if missing := sorted(set(cpus) - before):
            log.warning("CPUs %s of the plan are not there for this process", missing)
        wide = set(cpus) | (numa.cpus_of(node) & before if node >= 0 else set())
        try:
            os.sched_setaffinity(0, wide)
        except OSError as error:
            log.warning("cannot pin to CPUs %s: %s", sorted(wide), error.strerror)
            pinned = False
    if node >= 0:
        numa.keep_near(node)
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
