"""What this computer has: CPU nodes, cores, memory, GPUs, (later) links. JSON round trip.

Probing reads /sys, /proc and what the NVIDIA driver tells; a written Machine plans for a computer
that one does not own. Counts what this process may use: its CPU affinity and the limits of its
control groups.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from pathlib import Path

import msgspec
from voltapile.topology.cgroup import cpu_limit, memory_limit
from voltapile.topology.gpu import Gpu, probe_gpus

LINK_KINDS = ("nvlink", "pcie", "host")
MAX_RATE = 1e14  # bytes a second; above any memory


class MachineError(ValueError):
    """A Machine's JSON that cannot be read."""


class CpuNode(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node. cpus: one logical CPU per core first, their siblings after them."""

    id: int
    cpus: list[int]
    cores: int  # the first `cores` of cpus are distinct physical cores
    memory_bytes: int
    free_bytes: int
    bandwidth: float = 0.0  # of its memory, bytes a second; 0: unknown


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """How two GPUs reach each other, by their indexes."""

    a: int
    b: int
    kind: str  # nvlink | pcie | host: through host memory alone
    bandwidth: float  # bytes a second in each direction
    peer: bool = True  # each can read and write the other's memory


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


def probe(root: Path = Path("/"), allowed: Collection[int] | None = None) -> Machine:
    """This computer. root: another place of /sys and /proc; allowed: CPUs instead of affinity."""
    usable = os.sched_getaffinity(0) if allowed is None else set(allowed)
    memory = _meminfo(_text(root / "proc/meminfo"))
    total, available = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
    limit = memory_limit(root)
    if limit is not None:
        total, available = min(total, limit.total), min(available, limit.available)
    return Machine(
        name=platform.node(),
        arch=platform.machine(),
        cpu=_cpu_name(_text(root / "proc/cpuinfo")),
        nodes=_nodes(root, usable, total, available),
        memory_bytes=total,
        available_bytes=available,
        cpu_limit=cpu_limit(root),
        gpus=probe_gpus() if root == Path("/") else [],
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


def _fault(machine: Machine) -> str:
    """What cannot be true of a written Machine; "" where nothing is found."""
    if machine.version != 1 or not any(node.cpus for node in machine.nodes):
        return "expected a machine of version 1 with CPUs"
    for node in machine.nodes:
        if not 0 <= node.cores <= len(node.cpus) or len(set(node.cpus)) < len(node.cpus):
            return f"node {node.id} has {node.cores} cores, but CPUs {node.cpus}"
    ids = [node.id for node in machine.nodes]
    indexes = [gpu.index for gpu in machine.gpus]
    for what, numbers in (("node", ids), ("GPU", indexes)):
        if twice := [each for each in numbers if numbers.count(each) > 1]:
            return f"{what} {twice[0]} is there twice"
    sizes = {"this machine": (machine.available_bytes, machine.memory_bytes)}
    sizes |= {f"node {node.id}": (node.free_bytes, node.memory_bytes) for node in machine.nodes}
    sizes |= {f"GPU {gpu.index}": (gpu.free_bytes, gpu.memory_bytes) for gpu in machine.gpus}
    for what, (free, total) in sizes.items():
        if not 0 <= free <= total or total == 0:
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


def parse_cpus(text: str) -> list[int]:
    """The numbers in a kernel list, e.g. "0-3,8" -> [0, 1, 2, 3, 8]."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _text(path: Path) -> str:
    """A file's text; "" where it is missing, as in many containers."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _meminfo(text: str) -> dict[str, int]:
    """Bytes by name, of /proc/meminfo or of a node's ("Node 0 MemTotal: 8 kB")."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            found[name.split()[-1]] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found


def _cpu_name(cpuinfo: str) -> str:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "cpu", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()


def _nodes(root: Path, usable: set[int], total: int, available: int) -> list[CpuNode]:
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        mine = [cpu for cpu in parse_cpus(_text(folder / "cpulist")) if cpu in usable]
        if not mine:  # a node of memory alone, or one that is not ours
            continue
        memory = _meminfo(_text(folder / "meminfo"))
        cpus, cores = _cores_first(root, mine)
        node_total = min(memory.get("MemTotal", total), total)
        free = memory.get("MemFree", available) + memory.get("FilePages", 0)
        nodes.append(
            CpuNode(
                id=int(folder.name.removeprefix("node")),
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


def _cores_first(root: Path, cpus: list[int]) -> tuple[list[int], int]:
    """One CPU of each core, then the siblings; and the number of cores."""
    seen: set[tuple[int, ...]] = set()
    first: list[int] = []
    siblings: list[int] = []
    for cpu in sorted(cpus):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        core = tuple(parse_cpus(_text(topology / "thread_siblings_list"))) or (cpu,)
        (siblings if core in seen else first).append(cpu)
        seen.add(core)
    return first + siblings, len(first)
