"""The GPUs of this computer and the links between them, as the NVIDIA driver and /sys tell.

Nothing where there is no driver. Costs milliseconds and creates no context, so that a process
without GPU code may ask. Speeds follow from the links' generation and width, and are not measured.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import msgspec
from voltapile.topology import nvml
from voltapile.topology.nvml import Card, NvLink
from voltapile.topology.visible import visible

# Bytes a second of one lane of PCIe, by generation.
LANE_SPEED = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9}
# What of a link's speed arrives: 51 of 63 GB/s were measured over PCIe 5, and 343 of 450 over
# NVLink, on H200s; public work reports 68 to 72 of 75 GB/s over NVLink to the CPUs of an AC922.
PCIE_SHARE, NVLINK_SHARE, CPU_LINK_SHARE = 0.8, 0.76, 0.9
MEET_SHARE = 0.5  # of the slower card's way to the host, for two that meet there


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. index: as CUDA counts; arch: compute capability as 70, 75, 90. Bandwidths are
    bytes a second, 0: unknown; host_bandwidth: of reading its own node's memory. node: of the CPUs
    that it hangs on, -1: unknown."""

    index: int
    name: str
    arch: int
    memory_bytes: int
    free_bytes: int
    bandwidth: float = 0.0
    host_bandwidth: float = 0.0
    node: int = -1
    bus: str = ""  # its address there, e.g. 0000:04:00.0
    pcie: list[int] = []  # generation and lanes
    host_links: int = 0  # NVLinks to its CPU
    clock_mhz: int = 0  # the highest of its multiprocessors
    processes: dict[int, int] = {}  # bytes of those that compute there, by process id; 0: not told


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """How two GPUs reach each other, by their indexes."""

    a: int
    b: int
    kind: str  # nvlink | pcie | host: through host memory alone
    bandwidth: float  # bytes a second in each direction
    peer: bool = True  # each can read and write the other's memory


def probe_gpus(root: Path = Path("/"), seen: str | None = None) -> tuple[list[Gpu], list[Link]]:
    """root: another place of /sys. seen: CUDA_VISIBLE_DEVICES, if it is set."""
    with nvml.opened() as library:
        cards = visible(library.cards(), seen) if library is not None else []
        links = {card.index: card.links() for card in cards}
        found = [(card, _probe(card, links[card.index], root)) for card in cards]
        known = [(card, gpu) for card, gpu in found if gpu is not None]
        pairs = combinations(known, 2)
        return [gpu for _, gpu in known], [_link(*one, *other, links) for one, other in pairs]


def others() -> list[str]:
    """Processes beside this one that compute on GPUs, and what they have taken, for people."""
    found = []
    with nvml.opened() as library:
        for card in library.cards() if library is not None else []:
            for pid, nbytes in card.processes().items():
                if pid != os.getpid():
                    size = f"{nbytes / 2**30:.1f} GiB" if nbytes else "some memory"
                    found.append(f"{process_name(pid)} has {size} of GPU {card.index}")
    return found


def process_name(pid: int) -> str:
    """For people."""
    try:
        return f"{Path(f'/proc/{pid}/comm').read_text().strip()} (process {pid})"
    except OSError:  # in another container, or gone
        return f"process {pid}"


def _probe(card: Card, links: Sequence[NvLink], root: Path) -> Gpu | None:
    """None where the driver does not answer for it."""
    name, memory, arch = card.name, card.memory, card.arch
    if name is None or memory is None or arch is None:
        return None
    # The width is what was agreed on; the generation goes down while a card is idle.
    pcie = [card.number("MaxPcieLinkGeneration") or 0, card.number("CurrPcieLinkWidth") or 0]
    to_cpu = [link.speed for link in links if link.kind == nvml.PEER_IS_CPU]
    host = LANE_SPEED.get(pcie[0], 0.0) * pcie[1] * PCIE_SHARE
    bits = card.number("MemoryBusWidth") or 0
    return Gpu(
        index=card.index,
        name=name,
        arch=arch,
        memory_bytes=memory[0],
        free_bytes=memory[1],
        # Memory moves bits at both edges of its clock.
        bandwidth=2e6 * card.clock(nvml.MEMORY_CLOCK) * bits / 8,
        host_bandwidth=max(sum(to_cpu) * CPU_LINK_SHARE, host),
        node=_node(root, card.bus),
        bus=card.bus,
        pcie=pcie if all(pcie) else [],
        host_links=len(to_cpu),
        clock_mhz=card.clock(nvml.CORE_CLOCK),
        processes=card.processes(),
    )


def _link(one: Card, gpu: Gpu, other: Card, to: Gpu, links: dict[int, list[NvLink]]) -> Link:
    """Between two cards. A driver that is not asked in vain says whether they are peers; an old one
    lets those be that a link joins."""
    speed = max(_direct(links[gpu.index], to.bus), _direct(links[to.index], gpu.bus))
    switched = [
        sum(each.speed for each in links[index] if each.kind == nvml.PEER_IS_SWITCH)
        for index in (gpu.index, to.index)
    ]
    speed = max(speed, min(switched))
    answers = [
        a.reaches(b, how)
        for a, b in ((one, other), (other, one))
        for how in (nvml.READS, nvml.WRITES)
    ]
    peer = bool(speed) if None in answers else all(answers)
    to_host = min(gpu.host_bandwidth, to.host_bandwidth)
    if not peer:
        return Link(
            a=gpu.index, b=to.index, kind="host", bandwidth=MEET_SHARE * to_host, peer=False
        )
    kind, bandwidth = ("nvlink", speed * NVLINK_SHARE) if speed else ("pcie", to_host)
    return Link(a=gpu.index, b=to.index, kind=kind, bandwidth=bandwidth)


def _direct(links: Sequence[NvLink], bus: str) -> float:
    """Of all links that end there."""
    ours = (link.speed for link in links if link.kind == nvml.PEER_IS_GPU and link.bus == bus)
    return sum(ours) if bus else 0.0


def _node(root: Path, bus: str) -> int:
    try:
        return int((root / f"sys/bus/pci/devices/{bus}/numa_node").read_text())
    except (OSError, ValueError):
        return -1
