"""Machine: probing trees of /sys and /proc that were made up, and this computer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_nvml import Fake, FakeNvml, ac922
from voltapile.topology.machine import (
    Machine,
    MachineError,
    islands,
    load,
    probe,
    save,
)

MACHINES = sorted((Path(__file__).parents[1] / "data" / "machines").glob("*.json"))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """2 nodes x 2 cores x 2 threads, a third node of memory alone."""
    node, cpu = "sys/devices/system/node/node", "sys/devices/system/cpu/cpu"
    files = {
        "proc/meminfo": "MemTotal:  10000 kB\nMemFree: 100 kB\nMemAvailable:  1700 kB\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t: a b\n",
        f"{node}0/cpulist": "0-1,4-5\n",
        f"{node}0/meminfo": "Node 0 MemTotal: 600 kB\nNode 0 MemFree: 50 kB\n"
        "Node 0 FilePages: 450 kB\n",
        f"{node}1/cpulist": "2-3,6-7\n",
        f"{node}1/meminfo": "Node 1 MemTotal: 400 kB\nNode 1 MemFree: 50 kB\n",
        f"{node}255/cpulist": "\n",
        f"{node}255/meminfo": "Node 255 MemTotal: 9000 kB\nNode 255 MemFree: 900 kB\n",
        f"{node}0/distance": "10 40 80\n",
        f"{node}1/distance": "40 10 80\n",
        f"{node}255/distance": "80 60 10\n",
        "proc/driver/nvidia/gpus/0004:04:00.0/numa_status": "Node: 255\nStatus: online\n",
    }
    for number in range(8):
        siblings = f"{number % 4},{number % 4 + 4}\n"
        files[f"{cpu}{number}/topology/thread_siblings_list"] = siblings
    write(tmp_path, files)
    return tmp_path


def test_nodes_cores_and_memory(two_sockets: Path) -> None:
    machine = probe(two_sockets, allowed=range(8))
    assert machine.cpu == "Some CPU @ 2 GHz"
    assert (machine.memory_bytes, machine.available_bytes) == (1000 << 10, 800 << 10)
    assert [node.id for node in machine.nodes] == [0, 1]
    first, second = machine.nodes
    assert (first.cpus, first.cores) == ([0, 1, 4, 5], 2)
    assert (second.cpus, second.cores) == ([2, 3, 6, 7], 2)
    assert (first.memory_bytes, first.free_bytes) == (600 << 10, 500 << 10)
    assert machine.cpu_limit == 0


def test_memory_of_gpus_is_told_and_not_counted(two_sockets: Path) -> None:
    machine = probe(two_sockets, allowed=range(8))
    (node,) = machine.memory_nodes
    assert (node.id, node.is_gpu) == (255, True)
    assert (node.memory_bytes, node.free_bytes) == (9000 << 10, 900 << 10)


def test_a_node_with_cpus_and_no_memory(two_sockets: Path, tmp_path: Path) -> None:
    folder = "sys/devices/system/node/node1"
    write(two_sockets, {f"{folder}/meminfo": "Node 1 MemTotal: 0 kB\nNode 1 MemFree: 0 kB\n"})
    machine = probe(two_sockets, allowed=range(8))
    assert [node.memory_bytes for node in machine.nodes] == [600 << 10, 0]
    save(machine, tmp_path / "m.json")
    assert load(tmp_path / "m.json") == machine


@pytest.mark.parametrize(("told", "node"), [("1", 1), ("255", 1), ("-1", -1), (None, -1)])
def test_a_gpu_is_at_home_where_cpus_are(
    two_sockets: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, node: int
) -> None:
    if told is not None:
        write(two_sockets, {"sys/bus/pci/devices/0000:04:00.0/numa_node": f"{told}\n"})
    monkeypatch.setattr("ctypes.CDLL", lambda path: FakeNvml([Fake(bus="0000:04:00.0")]))
    assert [gpu.node for gpu in probe(two_sockets, allowed=range(8)).gpus] == [node]


@pytest.fixture
def ac922_tree(tmp_path: Path) -> Path:
    """What an AC922 shows: two nodes of 20 cores with 4 threads, six of GPU memory."""
    node = "sys/devices/system/node/node"
    ids = [0, 8, *range(250, 256)]
    size = 50331648
    files = {
        "proc/meminfo": f"MemTotal: {2 * size + 6 * 16 * 2**20} kB\nMemAvailable: {10**8} kB\n",
        "proc/cpuinfo": "processor\t: 0\ncpu\t\t: POWER9, altivec supported\n",
    }
    for place, each in enumerate(ids):
        own = f"{80 * place}-{80 * place + 79}\n" if each < 250 else "\n"
        total = size if each < 250 else 16 * 2**20
        files[f"{node}{each}/cpulist"] = own
        files[f"{node}{each}/meminfo"] = (
            f"Node {each} MemTotal: {total} kB\nNode {each} MemFree: 9 kB\n"
        )
        files[f"{node}{each}/distance"] = " ".join("10" if each == other else "40" if other < 250
                                                   else "80" for other in ids)  # fmt: skip
    for cpu in range(160):
        siblings = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        files[siblings] = f"{cpu // 4 * 4}-{cpu // 4 * 4 + 3}\n"
    for domain, home in ((4, 0), (5, 8)):
        for bus, own in zip((4, 5, 6), (250, 251, 252), strict=True):
            name = f"000{domain}:0{bus}:00.0"
            files[f"sys/bus/pci/devices/{name}/numa_node"] = f"{home}\n"
            files[f"proc/driver/nvidia/gpus/{name}/numa_status"] = f"Node: {own + domain % 4 * 3}\n"
    write(tmp_path, files)
    return tmp_path


def test_an_ac922_is_found_as_it_was_written(
    ac922_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ac922()
    monkeypatch.setattr("ctypes.CDLL", lambda path: library)
    found = probe(ac922_tree, allowed=range(160))
    (path,) = (path for path in MACHINES if path.stem.startswith("ac922"))
    written = load(path)
    assert islands(found) == islands(written)
    assert [node.id for node in found.nodes] == [node.id for node in written.nodes] == [0, 8]
    assert [node.cpus for node in found.nodes] == [node.cpus for node in written.nodes]
    assert found.memory_bytes == sum(node.memory_bytes for node in found.nodes)
    assert [(each.id, each.is_gpu) for each in found.memory_nodes] == [
        (each.id, each.is_gpu) for each in written.memory_nodes
    ]
    for ours, theirs in zip(found.gpus, written.gpus, strict=True):
        assert (ours.index, ours.node, ours.arch) == (theirs.index, theirs.node, theirs.arch)
        assert (ours.host_links, ours.clock_mhz) == (theirs.host_links, theirs.clock_mhz)
        assert ours.bandwidth == pytest.approx(theirs.bandwidth, rel=0.01)
    kinds = {(link.a, link.b): (link.kind, link.peer) for link in written.links}
    assert {(link.a, link.b): (link.kind, link.peer) for link in found.links} == kinds


def test_only_allowed_cpus_count(two_sockets: Path) -> None:
    (node,) = probe(two_sockets, allowed=[1, 5, 4]).nodes
    assert (node.id, node.cpus, node.cores) == (0, [1, 4, 5], 2)


def test_without_numa_in_sys(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 10 kB\nMemAvailable: 5 kB\n"})
    machine = probe(tmp_path, allowed=[3, 1])
    assert [(n.id, n.cpus, n.cores, n.free_bytes) for n in machine.nodes] == [(0, [1, 3], 2, 5120)]


def test_control_groups_narrow_it(two_sockets: Path) -> None:
    group = "sys/fs/cgroup/a/"
    files = {
        "proc/self/cgroup": "0::/a\n",
        group + "memory.max": str(300 << 10),
        group + "memory.current": str(100 << 10),
        group + "cpu.max": "150000 100000\n",
    }
    write(two_sockets, files)
    machine = probe(two_sockets, allowed=range(8))
    assert (machine.memory_bytes, machine.available_bytes) == (300 << 10, 200 << 10)
    assert machine.nodes[0].memory_bytes == 300 << 10
    assert machine.cpu_limit == 1.5


def test_this_computer() -> None:
    machine = probe()
    cpus = [cpu for node in machine.nodes for cpu in node.cpus]
    assert sorted(cpus) == sorted(os.sched_getaffinity(0))
    assert all(1 <= node.cores <= len(node.cpus) for node in machine.nodes)
    assert 0 < machine.available_bytes <= machine.memory_bytes


def test_json_round_trip(tmp_path: Path) -> None:
    machine = probe()
    save(machine, tmp_path / "m.json")
    assert load(tmp_path / "m.json") == machine


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_stored_machines(path: Path) -> None:
    machine = load(path)
    assert isinstance(machine, Machine)
    assert machine.name == path.stem
    assert machine.available_bytes <= machine.memory_bytes


def test_files_that_are_no_machine(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"x.json: No such file"):
        load(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(MachineError, match=r"x.json: not a machine: Expected `object`"):
        load(tmp_path / "x.json")
    text = MACHINES[0].read_text().replace('"version": 1', '"version": 9')
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(MachineError, match="expected a machine of version 1"):
        load(tmp_path / "x.json")


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_written_machines_can_be_true(path: Path) -> None:
    machine = load(path)
    assert machine.name == path.stem
    assert sorted(place for island in islands(machine) for place in island) == list(
        range(len(machine.gpus))
    )


def test_islands() -> None:
    found = {path.stem: islands(load(path)) for path in MACHINES}
    assert found["ac922-6xv100-16gb"] == [[0, 1, 2], [3, 4, 5]]
    assert found["x86-4xv100-32gb"] == [[0, 1, 2, 3]]
    assert found["x86-2xv100-16gb"] == [[0, 1]]  # over PCIe, since there is nothing faster
    assert found["x86-2x2080ti"] == [[0], [1]]
    assert found["laptop"] == []
    unknown = msgspec.structs.replace(load(MACHINES[0]), links=[])
    assert islands(unknown) == [[0, 1, 2, 3, 4, 5]]


GPU = {"index": 0, "name": "V100", "arch": 70, "memory_bytes": 16, "free_bytes": 15}
NODE = {"id": 0, "cpus": [0, 1], "cores": 2, "memory_bytes": 10, "free_bytes": 5}


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"version": 2}, "expected a machine of version 1 with CPUs"),
        ({"nodes": []}, "expected a machine of version 1 with CPUs"),
        ({"nodes": [NODE | {"cores": 3}]}, r"node 0 has 3 cores, but CPUs \[0, 1\]"),
        ({"nodes": [NODE | {"cpus": [1, 1]}]}, "CPU 1 is there twice"),
        ({"nodes": [NODE, NODE | {"id": 1}]}, "CPU 0 is there twice"),
        ({"nodes": [NODE | {"cores": 0}]}, r"node 0 has 0 cores, but CPUs \[0, 1\]"),
        ({"nodes": [NODE | {"id": -2}]}, "node -2 with CPUs .*: a number is negative"),
        ({"nodes": [NODE | {"cpus": [0, -1]}]}, "a number is negative"),
        ({"gpus": [GPU | {"node": 7}]}, "GPU 0 is at node 7, which is not there"),
        ({"gpus": [GPU | {"arch": 7}]}, "GPU 0 has arch 7, expected 50 to 130"),
        ({"nodes": [NODE, NODE]}, "node 0 is there twice"),
        (
            {"nodes": [NODE | {"cpus": [*range(200_000), 7], "cores": 1}]},
            "CPU 7 is there twice",
        ),
        ({"cpu_limit": -3}, "-3 CPUs' time is allowed"),
        ({"gpus": [GPU, GPU]}, "GPU 0 is there twice"),
        ({"gpus": [GPU | {"free_bytes": 17}]}, "GPU 0 has 16 bytes of memory, 17 of them free"),
        ({"gpus": [GPU | {"memory_bytes": 0, "free_bytes": 0}]}, "GPU 0 has 0 bytes"),
        ({"available_bytes": -1}, "this machine has 10 bytes of memory, -1 of them free"),
        ({"gpus": [GPU | {"bandwidth": 1e20}]}, "a bandwidth is not between 0 and 1e"),
        ({"disk_bandwidth": -1.0}, "a bandwidth is not between"),
        ({"links": [{"a": 0, "b": 1, "kind": "pcie", "bandwidth": 1.0}]},
         r"link 0-1 joins no two GPUs of \[0\]"),
        ({"links": [{"a": 0, "b": 0, "kind": "pcie", "bandwidth": 1.0}]}, "link 0-0 joins no two"),
        ({"links": [{"a": 0, "b": 1, "kind": "scsi", "bandwidth": 1.0}]}, "'scsi', expected nvl"),
        ({"memory_bytes": "ten"}, "not a machine: Expected `int`"),
    ],
)  # fmt: skip
def test_a_machine_that_lies(tmp_path: Path, lie: dict[str, Any], message: str) -> None:
    truth = {
        "name": "x", "arch": "x86_64", "cpu": "", "nodes": [NODE], "memory_bytes": 10,
        "available_bytes": 5, "gpus": [GPU],
    }  # fmt: skip
    path = tmp_path / "m.json"
    path.write_bytes(msgspec.json.encode(truth))
    load(path)
    path.write_bytes(msgspec.json.encode(truth | lie))
    with pytest.raises(MachineError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)
