"""CPU nodes: which CPUs and which memory lie together, as /sys tells.

A node may have CPUs and no memory, or memory and no CPUs: the memory of the GPUs of an AC922 is
such nodes, and nothing of ours may lie there. Knows what the kernel says and chooses nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path

import msgspec
from voltapile.shm.numa import parse

FOLDER = "sys/devices/system/node"


class CpuNode(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node. cpus: one logical CPU per core first, their siblings after them."""

    id: int
    cpus: list[int]
    cores: int  # the first `cores` of cpus are distinct physical cores
    memory_bytes: int
    free_bytes: int
    bandwidth: float = 0.0  # of its memory, bytes a second; 0: unknown


class MemoryNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node without CPUs, which is never chosen. is_gpu: it is a GPU's memory."""

    id: int
    memory_bytes: int
    free_bytes: int
    is_gpu: bool = False


def cpu_nodes(root: Path, usable: Collection[int], total: int, available: int) -> list[CpuNode]:
    """Those with a CPU of `usable`; one for everything where the kernel tells of none."""
    nodes = []
    for folder in folders(root):
        mine = [cpu for cpu in parse(text(folder / "cpulist")) if cpu in usable]
        if not mine:  # a node of memory alone, or one that is not ours
            continue
        memory = meminfo(text(folder / "meminfo"))
        cpus, cores = _cores_first(root, mine)
        node_total = min(memory.get("MemTotal", total), total)
        free = memory.get("MemFree", available) + memory.get("FilePages", 0)
        nodes.append(
            CpuNode(
                id=number(folder),
                cpus=cpus,
                cores=cores,
                memory_bytes=node_total,
                free_bytes=min(free, node_total, available),
            )
        )
    if nodes:
        return sorted(nodes, key=lambda node: node.id)
    cpus, cores = _cores_first(root, sorted(usable))
    return [CpuNode(id=0, cpus=cpus, cores=cores, memory_bytes=total, free_bytes=available)]


def memory_nodes(root: Path) -> list[MemoryNode]:
    """Those without CPUs."""
    of_gpus = {
        int(line.partition(":")[2])
        for path in (root / "proc/driver/nvidia/gpus").glob("*/numa_status")
        for line in text(path).splitlines()
        if line.startswith("Node:") and line.partition(":")[2].strip().isdigit()
    }
    found = []
    for folder in folders(root):
        memory = meminfo(text(folder / "meminfo"))
        if not text(folder / "cpulist").strip() and memory.get("MemTotal"):
            free = memory.get("MemFree", 0) + memory.get("FilePages", 0)
            free, total = min(free, memory["MemTotal"]), memory["MemTotal"]
            each = number(folder)
            found.append(
                MemoryNode(id=each, memory_bytes=total, free_bytes=free, is_gpu=each in of_gpus)
            )
    return sorted(found, key=lambda node: node.id)


def nearest(root: Path, node: int, known: Collection[int]) -> int:
    """`node` itself if it is known; else of those the nearest to it, by the kernel's distances; -1
    where nothing is told."""
    if node in known or node < 0:
        return node
    ids = sorted(map(number, folders(root)))
    words = text(root / FOLDER / f"node{node}/distance").split()
    distances = {each: int(word) for each, word in zip(ids, words, strict=False) if each in known}
    return min(distances, key=lambda each: (distances[each], each), default=-1)


def folders(root: Path) -> list[Path]:
    return [path for path in (root / FOLDER).glob("node*") if path.name[4:].isdigit()]


def number(folder: Path) -> int:
    return int(folder.name.removeprefix("node"))


def text(path: Path) -> str:
    """A file's text; "" where it is missing, as in many containers."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def meminfo(text: str) -> dict[str, int]:
    """Bytes by name, of /proc/meminfo or of a node's ("Node 0 MemTotal: 8 kB")."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            found[name.split()[-1]] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found


def _cores_first(root: Path, cpus: list[int]) -> tuple[list[int], int]:
    """One CPU of each core, then a second one of each, and so on; and the number of cores."""
    used: Counter[tuple[int, ...]] = Counter()
    turns: list[tuple[int, int]] = []
    for cpu in sorted(cpus):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        core = tuple(parse(text(topology / "thread_siblings_list"))) or (cpu,)
        turns.append((used[core], cpu))
        used[core] += 1
    return [cpu for _, cpu in sorted(turns)], len(used)
