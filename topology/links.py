"""What it costs that GPUs meet: seconds of a sum over ranks, and of handing on, by their links.

Arithmetic. Latencies follow what public work reports of one-shot push on V100s (6.7, 11, 18 and
34 us for 80, 160, 320 and 640 KiB over four cards) and what was measured on two H200s (3.0 us);
those without NVLink and across islands are guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from voltapile.topology.machine import Link, Machine, islands

SECONDS = {"nvlink": 3.2e-6, "pcie": 8e-6, "host": 15e-6}  # of a small message
UNKNOWN = Link(a=0, b=1, kind="pcie", bandwidth=10e9)


def reduce_seconds(machine: Machine, places: Sequence[int], nbytes: float) -> float:
    """A sum of `nbytes` on each of these GPUs: within islands, then across them."""
    if len(places) < 2:
        return 0.0
    groups = [sorted(set(places) & set(island)) for island in islands(machine)]
    groups = [group for group in groups if group]
    inner = max(_worst(machine, group, nbytes) for group in groups)
    if len(groups) == 1:
        return inner
    return inner + _worst(machine, [group[0] for group in groups], nbytes)


def send_seconds(machine: Machine, source: int, target: int, nbytes: float) -> float:
    """Handing `nbytes` from one GPU to another."""
    return _worst(machine, [source, target], nbytes)


def _worst(machine: Machine, places: Sequence[int], nbytes: float) -> float:
    """Everyone writes to everyone else at once; those on PCIe or through the host share the way."""
    if len(places) < 2:
        return 0.0
    seconds = 0.0
    for a, b in combinations(places, 2):
        link = link_of(machine, a, b)
        crowd = 1 if link.kind == "nvlink" else len(places) - 1
        seconds = max(seconds, SECONDS[link.kind] + crowd * nbytes / link.bandwidth)
    return seconds


def link_of(machine: Machine, a: int, b: int) -> Link:
    """Between two GPUs, by their places in the list."""
    pair = {machine.gpus[a].index, machine.gpus[b].index}
    for link in machine.links:
        if {link.a, link.b} == pair and link.bandwidth:
            return link
    return UNKNOWN
