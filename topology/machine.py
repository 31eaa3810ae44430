"""What this computer has: CPU nodes, cores, memory, GPUs and their links. JSON round trip.

Probing reads /sys, /proc and what the NVIDIA driver tells; a written Machine plans for a computer
that one does not own. Counts what this process may use: its CPU affinity, the limits of its
control groups, and the GPUs that it is told to see.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import msgspec
from voltapile.topology.cgroup import cpu_limit, memory_limit
from voltapile.topology.gpu import Gpu, Link, probe_gpus
from voltapile.topology.nodes import CpuNode, MemoryNode, cpu_nodes, meminfo, memory_nodes, nearest
from voltapile.topology.nodes import text as _text

__all__ = ["CpuNode", "Gpu", "Link", "Machine", "MachineError", "islands", "load", "probe", "save"]

LINK_KINDS = ("nvlink", "pcie", "host")
LEAST_ARCH, MOST_ARCH = 50, 130  # compute capability of GPUs, ten times
MAX_RATE = 1e14  # bytes a second; above any memory


class MachineError(ValueError):
    """A Machine's JSON that cannot be read."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One computer."""

    version: int = 1
    name: str
    arch: str  # platform.machine(): "x86_64", "ppc64le"
    cpu: str  # model name, for people
    nodes: list[CpuNode]  # those with a CPU that this process may use
    memory_bytes: int
    available_bytes: int
    cpu_limit: float = 0.0  # CPUs' worth of time that a control group allows; 0: no limit
    gpus: list[Gpu] = []
    links: list[Link] = []  # of pairs of GPUs; []: unknown
    disk_bandwidth: float = 0.0  # of the drive with the models, bytes a second; 0: unknown
    disk: str = ""  # which that is
    shared_bytes: int = 0  # of shared memory that are free; 0: unknown
    memory_nodes: list[MemoryNode] = []  # nodes without CPUs: their memory is not counted above


def probe(
    root: Path = Path("/"), allowed: Collection[int] | None = None, seen: str | None = None
) -> Machine:
    """This computer. root: another place of /sys and /proc; allowed: CPUs instead of affinity;
    seen: CUDA_VISIBLE_DEVICES, if it is set."""
    usable = os.sched_getaffinity(0) if allowed is None else set(allowed)
    memory, others = meminfo(_text(root / "proc/meminfo")), memory_nodes(root)
    total = memory.get("MemTotal", 0) - sum(node.memory_bytes for node in others)
    available = memory.get("MemAvailable", 0) - sum(node.free_bytes for node in others)
    limit = memory_limit(root)
    if limit is not None:
        total, available = min(total, limit.total), min(available, limit.available)
    total, available = max(0, total), min(max(0, available), max(0, total))
    nodes = cpu_nodes(root, usable, total, available)
    gpus, links = probe_gpus(root, seen)
    return Machine(
        name=platform.node(),
        arch=platform.machine(),
        cpu=_cpu_name(_text(root / "proc/cpuinfo")),
        nodes=nodes,
        memory_bytes=total,
        available_bytes=available,
        cpu_limit=cpu_limit(root),
        gpus=[_at_home(root, gpu, nodes) for gpu in gpus],
        links=links,
        memory_nodes=others,
        shared_bytes=_shared(root / "dev/shm"),
    )


def load(path: str | os.PathLike[str]) -> Machine:
    """A Machine that `save` wrote. Raises MachineError."""
    try:
        machine = msgspec.json.decode(Path(path).read_bytes(), type=Machine)
    except OSError as error:
        raise MachineError(f"{os.fspath(path)}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise MachineError(f"{os.fspath(path)}: not a machine: {error}") from None
    if fault := _fault(machine):
        raise MachineError(f"{os.fspath(path)}: {fault}: correct the file")
    return machine


def islands(machine: Machine) -> list[list[int]]:
    """Groups of GPUs, by place in the list, within which each reaches another's memory over NVLink,
    or over PCIe where there is no NVLink. One group where links are unknown."""
    places = {gpu.index: place for place, gpu in enumerate(machine.gpus)}
    if not machine.links:
        return [list(places.values())] if places else []
    fast = [link for link in machine.links if link.peer and link.kind == "nvlink"]
    fast = fast or [link for link in machine.links if link.peer]
    groups = {place: {place} for place in places.values()}
    for link in fast:
        if link.a in places and link.b in places:
            joined = groups[places[link.a]] | groups[places[link.b]]
            groups |= dict.fromkeys(joined, joined)
    return sorted({tuple(sorted(group)): sorted(group) for group in groups.values()}.values())


def _shared(folder: Path) -> int:
    """Free bytes of a file system."""
    try:
        there = os.statvfs(folder)
    except OSError:
        return 0
    return there.f_bavail * there.f_frsize


def _at_home(root: Path, gpu: Gpu, nodes: Collection[CpuNode]) -> Gpu:
    """With a node that has CPUs for us: its own, or the nearest to it."""
    home = nearest(root, gpu.node, [node.id for node in nodes])
    return msgspec.structs.replace(gpu, node=home)


def _fault(machine: Machine) -> str:
    """What cannot be true of a written Machine; "" where nothing is found."""
    if machine.version != 1 or not any(node.cpus for node in machine.nodes):
        return "expected a machine of version 1 with CPUs"
    for node in machine.nodes:
        if node.id < 0 or any(cpu < 0 for cpu in node.cpus):
            return f"node {node.id} with CPUs {node.cpus}: a number is negative"
        if not min(1, len(node.cpus)) <= node.cores <= len(node.cpus):
            return f"node {node.id} has {node.cores} cores, but CPUs {node.cpus}"
    ids = [node.id for node in machine.nodes]
    indexes = [gpu.index for gpu in machine.gpus]
    cpus = [cpu for node in machine.nodes for cpu in node.cpus]
    for what, numbers in (("node", ids), ("GPU", indexes), ("CPU", cpus)):
        if len(set(numbers)) < len(numbers):
            twice = next(each for each, count in Counter(numbers).items() if count > 1)
            return f"{what} {twice} is there twice"
    for gpu in machine.gpus:
        if gpu.node not in (-1, *ids):
            return f"GPU {gpu.index} is at node {gpu.node}, which is not there"
        if not LEAST_ARCH <= gpu.arch <= MOST_ARCH:
            return f"GPU {gpu.index} has arch {gpu.arch}, expected {LEAST_ARCH} to {MOST_ARCH}"
    if not machine.cpu_limit >= 0:
        return f"{machine.cpu_limit:g} CPUs' time is allowed"
    if machine.shared_bytes < 0:
        return f"{machine.shared_bytes} bytes of shared memory are free"
    sizes = {"this machine": (machine.available_bytes, machine.memory_bytes)}
    sizes |= {f"node {node.id}": (node.free_bytes, node.memory_bytes) for node in machine.nodes}
    sizes |= {f"GPU {gpu.index}": (gpu.free_bytes, gpu.memory_bytes) for gpu in machine.gpus}
    for what, (free, total) in sizes.items():
        if not 0 <= free <= total or (total == 0 and not what.startswith("node")):
            return f"{what} has {total} bytes of memory, {free} of them free"
    rates = [node.bandwidth for node in machine.nodes] + [link.bandwidth for link in machine.links]
    rates += [rate for gpu in machine.gpus for rate in (gpu.bandwidth, gpu.host_bandwidth)]
    if any(not 0 <= rate < MAX_RATE for rate in [*rates, machine.disk_bandwidth]):
        return f"a bandwidth is not between 0 and {MAX_RATE:.0e} bytes a second"
    return _link_fault(machine, indexes)


def _link_fault(machine: Machine, indexes: list[int]) -> str:
    pairs = []
    for link in machine.links:
        if link.kind not in LINK_KINDS:
            return f"link {link.a}-{link.b} is {link.kind!r}, expected {', '.join(LINK_KINDS)}"
        pairs.append((min(link.a, link.b), max(link.a, link.b)))
        if link.a == link.b or not {link.a, link.b} <= set(indexes):
            return f"link {link.a}-{link.b} joins no two GPUs of {indexes}"
        if pairs.count(pairs[-1]) > 1:
            return f"link {link.a}-{link.b} is there twice"
    return ""


def save(machine: Machine, path: str | os.PathLike[str]) -> None:
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(machine)) + b"\n")


def _cpu_name(cpuinfo: str) -> str:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "cpu", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()
