"""What of this computer keeps a server from starting, or from being fast, and what to change.

Reads what the kernel and the driver tell, and changes nothing. A Finding is "ok"; "note": good to
know; "slow": costs speed or may fail later; "fault": keeps the server from working. Knows neither
models nor Plans.
"""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from voltapile.shm import huge, numa
from voltapile.shm.segment import FOLDER, PREFIX, is_stale
from voltapile.topology import nvml
from voltapile.topology.gpu import process_name
from voltapile.topology.machine import Machine
from voltapile.topology.ranks import LEAST_ARCH

LEAST_CUDA = (12, 0)  # that a driver must know: CUDA 12 is the last with Volta
LEAST_SHM, ROOMY_SHM = 16 << 20, 1 << 30
LEAST_LOCKED = 1 << 30
LEAST_FILES = 4096
NVIDIA, DISPLAY = "0x10de", "0x03"  # a vendor, and what a class begins with
PROHIBITED = 2  # a compute mode
FILLED = 256 << 20  # bytes of a GPU that nobody computes on, above which somebody's memory is there


@dataclass(frozen=True)
class Finding:
    """remedy: what to change, "" where nothing is to be done."""

    level: str
    what: str
    remedy: str = ""


@dataclass(frozen=True)
class Sight:
    """What is looked at. root: another place of /sys and /proc."""

    machine: Machine
    root: Path = Path("/")
    shm: Path = FOLDER

    def text(self, path: str) -> str:
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""


def examine(sight: Sight) -> Iterator[Finding]:
    """Everything, in order of what matters most."""
    for check in CHECKS:
        yield from check(sight)


def driver(sight: Sight) -> Iterator[Finding]:
    cards = _cards_on_bus(sight)
    with nvml.opened() as library:
        if library is None:
            if cards:
                yield Finding(
                    "fault",
                    f"NVIDIA GPUs at {', '.join(cards)}, and no driver that answers",
                    "install NVIDIA's driver (for Volta 580 is the last), or start the container "
                    "with GPUs; --device cpu works without",
                )
            else:
                yield Finding("note", "no NVIDIA GPU: models are computed by the CPU")
            return
        major, minor = library.cuda
        told = f"driver {library.driver}, CUDA {major}.{minor}"
        if (major, minor) < LEAST_CUDA:
            need = ".".join(map(str, LEAST_CUDA))
            yield Finding(
                "fault", f"{told}: CUDA {need} is the least", "install driver 525 or newer"
            )
        else:
            yield Finding("ok", told)
        silent = len(cards) - len(library.cards())
        if silent > 0:
            yield Finding(
                "slow",
                f"{silent} of {len(cards)} GPUs on the bus do not answer",
                "look for Xid in dmesg: one may have fallen off the bus; or the container has not "
                "all of them",
            )
        for card in library.cards():
            yield from _card(card, _name(card, sight.machine))


def _cards_on_bus(sight: Sight) -> list[str]:
    """Addresses of NVIDIA's graphics cards."""
    return sorted(
        folder.name
        for folder in (sight.root / "sys/bus/pci/devices").glob("*")
        if sight.text(f"sys/bus/pci/devices/{folder.name}/vendor") == NVIDIA
        and sight.text(f"sys/bus/pci/devices/{folder.name}/class").startswith(DISPLAY)
    )


def _name(card: nvml.Card, machine: Machine) -> str:
    """As nvidia-smi counts, and as --device does where that is another number or none."""
    ours = [gpu.index for gpu in machine.gpus if gpu.bus == card.bus]
    if not card.bus or ours == [card.index]:
        return f"GPU {card.index} ({card.name})"
    return f"GPU {card.index} ({card.name}, {f'here cuda:{ours[0]}' if ours else 'not visible'})"


def _card(card: nvml.Card, name: str) -> Iterator[Finding]:
    arch = card.arch or 0
    if arch < LEAST_ARCH:
        yield Finding("note", f"{name}: compute capability {arch / 10}, and 7.0 is the least",
                      "it is left out")  # fmt: skip
        return
    if card.number("PersistenceMode") == 0:
        yield Finding("slow", f"{name}: the driver lets go of it when nobody uses it",
                      "nvidia-smi -pm 1, or enable nvidia-persistenced")  # fmt: skip
    if card.number("ComputeMode") == PROHIBITED:
        yield Finding("fault", f"{name}: its compute mode forbids all use",
                      f"nvidia-smi -i {card.index} -c DEFAULT")  # fmt: skip
    lanes, most = card.number("CurrPcieLinkWidth"), card.number("MaxPcieLinkWidth")
    if lanes and most and lanes < most:
        yield Finding("slow", f"{name}: {lanes} of its {most} PCIe lanes are in use",
                      "look at the slot and the BIOS; weights come so much later")  # fmt: skip
    yield from _memory_of(card, name)


def _memory_of(card: nvml.Card, name: str) -> Iterator[Finding]:
    total, free = card.memory or (0, 0)
    used = total - free
    users = {pid: nbytes for pid, nbytes in card.processes().items() if pid != os.getpid()}
    if users:
        each = ", ".join(f"{process_name(pid)} {_gib(nbytes)}" for pid, nbytes in users.items())
        yield Finding("note", f"{name}: {_gib(used)} of {_gib(total)} are in use ({each})",
                      "plans count on what is free; end those for more")  # fmt: skip
    elif used > max(FILLED, total // 16):
        yield Finding("slow", f"{name}: {_gib(used)} are in use and no process computes there",
                      "page cache may lie in the GPU's memory: "
                      "echo 3 > /proc/sys/vm/drop_caches")  # fmt: skip


def peers(sight: Sight) -> Iterator[Finding]:
    gpus, links = sight.machine.gpus, sight.machine.links
    apart = [f"cuda:{link.a}-{link.b}" for link in links if not link.peer]
    if len(gpus) < 2:
        return
    if not apart:
        kinds = sorted({link.kind for link in links})
        yield Finding("ok", f"all {len(gpus)} GPUs reach each other's memory ({', '.join(kinds)})")
        return
    yield Finding(
        "slow" if len(apart) == len(links) else "note",
        f"GPUs {', '.join(apart)} do not reach each other's memory: sums go through the host's",
        "nothing, on cards of two sockets; else switch ACS and the IOMMU off, or give the virtual "
        "machine whole NVLink groups. nvidia-smi topo -p2p r",
    )


def placing(sight: Sight) -> Iterator[Finding]:
    """CPU nodes, and whether memory can be put on them."""
    nodes = sight.machine.nodes
    library = numa.libnuma()
    if library is None:
        yield Finding(
            "slow" if len(nodes) > 1 else "note",
            "libnuma does not work here, so memory is not placed on CPU nodes",
            "install libnuma1 (numactl-libs); a container needs --cap-add SYS_NICE",
        )
    elif not _can_place(nodes[0].id):
        yield Finding(
            "slow" if len(nodes) > 1 else "note",
            "mbind is refused: memory lies where it is first touched",
            "start the container with --cap-add SYS_NICE",
        )
    else:
        yield Finding("ok", f"memory can be placed on {len(nodes)} CPU node(s)")
    for node in sight.machine.memory_nodes:
        used = node.memory_bytes - node.free_bytes
        what = "a GPU's memory" if node.is_gpu else "no CPUs"
        yield Finding("note", f"node {node.id} ({what}, {_gib(used)} in use) is never chosen")


def _can_place(node: int) -> bool:
    room = mmap.mmap(-1, 1 << 16)
    return numa.place(np.frombuffer(room, np.uint8).ctypes.data, 1 << 16, [node])


def shared_memory(sight: Sight) -> Iterator[Finding]:
    try:
        there = os.statvfs(sight.shm)
    except OSError as error:
        yield Finding("fault", f"{sight.shm}: {error.strerror}",
                      "mount -t tmpfs tmpfs /dev/shm")  # fmt: skip
        return
    if not os.access(sight.shm, os.W_OK | os.X_OK):
        yield Finding("fault", f"{sight.shm}: this user cannot write there, and ranks meet there",
                      f"mount -o remount,rw,mode=1777 {sight.shm}")  # fmt: skip
        return
    free, total = there.f_bavail * there.f_frsize, there.f_blocks * there.f_frsize
    shown = f"{sight.shm}: {_mib(free)} of {_mib(total)} MiB free"
    remedy = f"mount -o remount,size=8G {sight.shm}, or --shm-size 8g for a container"
    if not total:
        yield Finding("ok", f"{sight.shm} has no limit")
    elif free < LEAST_SHM:
        yield Finding("fault", f"{shown}: ranks have no room to meet", remedy)
    elif free < ROOMY_SHM:
        yield Finding("slow", f"{shown}: little for several ranks and a shared embedding", remedy)
    else:
        yield Finding("ok", shown)
    names = sorted(sight.shm.glob(f"{PREFIX}*"))
    stale = [path.name for path in names if is_stale(path)]
    if stale:
        yield Finding("note", f"left by processes that have died: {', '.join(stale)}",
                      "the next start removes it")  # fmt: skip
    if len(names) > len(stale):
        yield Finding("note", f"{len(names) - len(stale)} segment(s) of servers that run now")


def huge_pages(sight: Sight) -> Iterator[Finding]:
    private, shared = huge.private_fault(sight.root), huge.shared_fault(sight.root)
    if private:
        what, _, remedy = private.partition(": ")
        yield Finding("slow", f"huge pages for --no-mmap: {what}", remedy)
    if shared:
        what, _, remedy = shared.partition(": ")
        yield Finding("note", f"huge pages for shared memory: {what}", remedy)
    if not private and not shared:
        yield Finding("ok", "huge pages for those who ask")


def limits(sight: Sight) -> Iterator[Finding]:
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if 0 <= locked < LEAST_LOCKED and sight.machine.gpus:
        yield Finding(
            "slow",
            f"ulimit -l is {locked >> 10} KiB: memory that GPUs read is locked, and some systems "
            "count it",
            "LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1 for a container, or memlock in "
            "/etc/security/limits.conf",
        )
    else:
        shown = f"{locked >> 10} KiB" if locked >= 0 else "unlimited"
        yield Finding("ok", f"locked memory: {shown}")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < LEAST_FILES:
        yield Finding("note", f"ulimit -n is {files}: so many connections at most",
                      f"ulimit -n {LEAST_FILES}, or LimitNOFILE in the unit")  # fmt: skip
    allowed, cores = sight.machine.cpu_limit, sum(node.cores for node in sight.machine.nodes)
    if 0 < allowed < cores:
        yield Finding("note", f"a control group allows {allowed:g} of {cores} cores' time",
                      "--cpus for a container; threads are planned for it")  # fmt: skip


def kernel(sight: Sight) -> Iterator[Finding]:
    """Settings of the system that cost speed."""
    several = len(sight.machine.nodes) > 1
    if sight.text("proc/sys/kernel/numa_balancing") == "1" and several:
        yield Finding("slow", "the kernel moves pages between CPU nodes by itself",
                      "sysctl kernel.numa_balancing=0")  # fmt: skip
    if sight.text("proc/sys/vm/zone_reclaim_mode") not in ("", "0"):
        yield Finding("slow", "the kernel drops cached files rather than use another node's memory",
                      "sysctl vm.zone_reclaim_mode=0")  # fmt: skip
    if sight.text("proc/sys/vm/overcommit_memory") == "2":
        yield Finding("slow", "the kernel refuses memory that might not be there when it is used",
                      "sysctl vm.overcommit_memory=0, if a start fails")  # fmt: skip
    chosen = {
        sight.text(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor")
        for node in sight.machine.nodes
        for cpu in node.cpus
    } - {""}
    if chosen - {"performance"}:
        yield Finding("slow", f"the governor of CPUs is {', '.join(sorted(chosen))}",
                      "cpupower frequency-set -g performance")  # fmt: skip
    elif chosen:
        yield Finding("ok", "CPUs run at full speed (governor performance)")


CHECKS: tuple[Callable[[Sight], Iterator[Finding]], ...] = (
    driver,
    peers,
    placing,
    shared_memory,
    huge_pages,
    limits,
    kernel,
)


def _mib(nbytes: int) -> str:
    return f"{nbytes >> 20}" if nbytes >= 1 << 20 or not nbytes else f"{nbytes / 2**20:.2f}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
