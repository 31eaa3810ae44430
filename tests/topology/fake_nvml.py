"""A driver's management library that was made up: answers for cards that were described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

GPU, CPU, SWITCH = range(3)


@dataclass
class Fake:
    """One card, a V100. links: kind, bus of the other end, version."""

    bus: str = "0000:04:00.0"
    name: str = "Tesla V100-SXM2-16GB"
    memory: tuple[int, int] = (16 << 30, 15 << 30)
    arch: tuple[int, int] = (7, 0)
    pcie: tuple[int, int] = (3, 16)
    links: Sequence[tuple[int, str, int]] = ()
    processes: dict[int, int] = field(default_factory=dict)
    answers: bool = True
    persistence: int = 1
    mode: int = 0
    uuid: str = ""


class FakeNvml:
    """peers: pairs of places that reach each other; None: the driver does not know the question."""

    def __init__(self, cards: Sequence[Fake], peers: Sequence[tuple[int, int]] | None = ()) -> None:
        self.cards, self.peers, self.is_shut = cards, peers, False

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> None:
        self.is_shut = True

    def nvmlSystemGetDriverVersion(self, text: Any, room: Any) -> int:
        text.value = b"550.54.15"
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, value: Any) -> int:
        value._obj.value = 12040
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.cards)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 0 if self.cards[index.value].answers else 15

    def card(self, handle: Any) -> Fake:
        return self.cards[handle.value - 1]

    def nvmlDeviceGetName(self, handle: Any, name: Any, room: Any) -> int:
        name.value = self.card(handle).name.encode()
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, room: Any) -> int:
        text.value = self.card(handle).uuid.encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.free = self.card(handle).memory
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self.card(handle).arch
        return 0

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: int, mhz: Any) -> int:
        mhz._obj.value = {1: 1530, 2: 877}[kind]
        return 0

    def nvmlDeviceGetMemoryBusWidth(self, handle: Any, bits: Any) -> int:
        bits._obj.value = 4096
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, pci: Any) -> int:
        pci._obj.bus = b"0000" + self.card(handle).bus.upper().encode()
        return 0

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any, value: Any) -> int:
        value._obj.value = self.card(handle).pcie[0]
        return 0

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Any, value: Any) -> int:
        value._obj.value = self.card(handle).pcie[1]
        return 0

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: Any, value: Any) -> int:
        links = self.card(handle).links
        value._obj.value = link.value < len(links)
        return 0 if link.value <= len(links) else 3

    def nvmlDeviceGetNvLinkRemotePciInfo_v2(self, handle: Any, link: Any, pci: Any) -> int:
        pci._obj.bus = b"0000" + self.card(handle).links[link.value][1].upper().encode()
        return 0

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: Any, value: Any) -> int:
        value._obj.value = self.card(handle).links[link.value][0]
        return 0

    def nvmlDeviceGetNvLinkVersion(self, handle: Any, link: Any, value: Any) -> int:
        value._obj.value = self.card(handle).links[link.value][2]
        return 0

    def nvmlDeviceGetP2PStatus(self, handle: Any, other: Any, how: Any, status: Any) -> int:
        if self.peers is None:
            return 13
        pair = handle.value - 1, other.value - 1
        status._obj.value = 0 if tuple(sorted(pair)) in self.peers else 4
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, found: Any) -> int:
        processes = self.card(handle).processes
        for place, (pid, used) in enumerate(processes.items()):
            found[place].pid, found[place].used = pid, used
        count._obj.value = len(processes)
        return 0

    def nvmlDeviceGetPersistenceMode(self, handle: Any, value: Any) -> int:
        value._obj.value = self.card(handle).persistence
        return 0

    def nvmlDeviceGetComputeMode(self, handle: Any, value: Any) -> int:
        value._obj.value = self.card(handle).mode
        return 0


class OldNvml(FakeNvml):
    """A driver that does not know some questions."""

    nvmlDeviceGetMemoryBusWidth = property()  # type: ignore[assignment]
    nvmlDeviceGetNvLinkState = property()  # type: ignore[assignment]
    nvmlDeviceGetP2PStatus = property()  # type: ignore[assignment]
    nvmlDeviceGetComputeRunningProcesses_v3 = property()  # type: ignore[assignment]


def ac922() -> FakeNvml:
    """Six cards in two islands of three: two links to each of the same island and to the CPU."""
    buses = [f"000{domain}:0{bus}:00.0" for domain in (4, 5) for bus in (4, 5, 6)]
    cards = []
    for place, bus in enumerate(buses):
        island = buses[place // 3 * 3 :][:3]
        links = [(GPU, other, 2) for other in island if other != bus for _ in range(2)]
        cards.append(Fake(bus=bus, links=[*links, (CPU, "", 2), (CPU, "", 2)]))
    pairs = [(a, b) for a in range(6) for b in range(a + 1, 6) if a // 3 == b // 3]
    return FakeNvml(cards, pairs)
