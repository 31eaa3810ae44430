"""What the driver tells becomes Gpu and Link records; a driver that is not there is no error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import GPU, SWITCH, Fake, FakeNvml, OldNvml, ac922
from voltapile.topology.gpu import Gpu, Link, others, probe_gpus


def probed(
    monkeypatch: pytest.MonkeyPatch, library: FakeNvml, root: Path = Path("/nowhere")
) -> tuple[list[Gpu], list[Link]]:
    monkeypatch.setattr("ctypes.CDLL", lambda path: library)
    found = probe_gpus(root)
    assert library.is_shut
    return found


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0004:0b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("8\n")
    cards = [Fake(bus="0004:0B:00.0", processes={77: 1 << 30, 78: 2**64 - 1}), Fake(answers=False)]
    gpus, links = probed(monkeypatch, FakeNvml(cards), tmp_path)
    assert links == []
    assert gpus == [
        Gpu(
            index=0,
            name="Tesla V100-SXM2-16GB",
            arch=70,
            memory_bytes=16 << 30,
            free_bytes=15 << 30,
            bandwidth=877e6 * 2 * 4096 / 8,
            host_bandwidth=pytest.approx(12.6e9, rel=0.01),
            node=8,
            bus="0004:0b:00.0",
            pcie=[3, 16],
            clock_mhz=1530,
            processes={77: 1 << 30, 78: 0},
        )
    ]


def test_two_islands_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an AC922: 38 GB/s of the 50 in an island, host memory between islands."""
    gpus, links = probed(monkeypatch, ac922())
    assert [gpu.host_links for gpu in gpus] == [2] * 6
    assert gpus[0].host_bandwidth == pytest.approx(45e9)
    kinds = {(link.a, link.b): (link.kind, link.peer) for link in links}
    assert len(kinds) == 15
    for (a, b), found in kinds.items():
        assert found == (("nvlink", True) if a // 3 == b // 3 else ("host", False))
    assert [link.bandwidth for link in links if link.peer] == pytest.approx([38e9] * 6)


def test_links_to_a_switch_reach_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [
        Fake(bus=f"0000:0{place}:00.0", pcie=(5, 16), links=[(SWITCH, "0000:50:00.0", 4)] * count)
        for place, count in ((1, 18), (2, 16))
    ]
    _, links = probed(monkeypatch, FakeNvml(cards, [(0, 1)]))
    assert links == [Link(a=0, b=1, kind="nvlink", bandwidth=pytest.approx(16 * 25e9 * 0.76))]


@pytest.mark.parametrize(
    ("peers", "kind", "is_peer", "bandwidth"),
    [([(0, 1)], "pcie", True, 6.3e9), ([], "host", False, 3.15e9), (None, "host", False, 3.15e9)],
)
def test_without_links(
    monkeypatch: pytest.MonkeyPatch, peers: Any, kind: str, is_peer: bool, bandwidth: float
) -> None:
    """The slower card sets the pace; a driver that cannot be asked lets nobody be a peer."""
    cards = [Fake(bus="0000:01:00.0"), Fake(bus="0000:02:00.0", pcie=(3, 8))]
    _, (link,) = probed(monkeypatch, FakeNvml(cards, peers))
    assert (link.kind, link.peer) == (kind, is_peer)
    assert link.bandwidth == pytest.approx(bandwidth, rel=0.01)


def test_a_link_that_the_driver_forbids(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [Fake(bus="0000:01:00.0", links=[(GPU, "0000:02:00.0", 2)]), Fake(bus="0000:02:00.0")]
    assert probed(monkeypatch, FakeNvml(cards, []))[1][0].kind == "host"
    assert probed(monkeypatch, FakeNvml(cards, None))[1][0].kind == "nvlink"


def test_an_old_driver_tells_less(monkeypatch: pytest.MonkeyPatch) -> None:
    (gpu,), _ = probed(monkeypatch, OldNvml([Fake()]))
    assert (gpu.bandwidth, gpu.processes, gpu.host_links) == (0.0, {}, 0)


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str) -> Any:
        raise OSError(path)

    monkeypatch.setattr("ctypes.CDLL", load)
    assert probe_gpus() == ([], [])


def test_who_else_computes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    far = 2**22 + 1  # no process of this container
    cards = [Fake(), Fake(processes={os.getpid(): 1 << 30, far: 3 << 30, 1: 2**64 - 1})]
    monkeypatch.setattr("ctypes.CDLL", lambda path: FakeNvml(cards))
    found = others()
    assert found[0] == f"process {far} has 3.0 GiB of GPU 1"
    assert found[1].endswith("(process 1) has some memory of GPU 1")
    assert len(found) == 2
