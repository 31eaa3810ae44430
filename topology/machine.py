"""What this computer has: CPU nodes, cores, memory, (later) GPUs and links. JSON round trip.

Probing only reads /sys and /proc; a written Machine plans for a computer that one does not own.
"""

from __future__ import annotations

import msgspec


class CpuNode(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node. cpus: one logical CPU per core first, their siblings after them."""

    id: int
    cpus: list[int]
    cores: int  # the first `cores` of cpus are distinct physical cores
    memory_bytes: int
    free_bytes: int


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One computer."""

    version: int = 1
    name: str
    arch: str  # platform.machine(): "x86_64", "ppc64le"
    cpu: str  # model name, for people
    nodes: list[CpuNode]
    memory_bytes: int
    available_bytes: int
