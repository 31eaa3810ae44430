"""The doctor on made-up computers: each ill is found, with numbers and what to change."""

from __future__ import annotations

import os
import resource
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fake_nvml import Fake, FakeNvml
from voltapile.shm.segment import FOLDER
from voltapile.topology import doctor
from voltapile.topology.doctor import CHECKS, Finding, Sight, examine
from voltapile.topology.gpu import Gpu, Link, probe_gpus
from voltapile.topology.machine import CpuNode, Machine
from voltapile.topology.nodes import MemoryNode

GIB = 1 << 30
GPUS = [
    Gpu(index=index, name="V100", arch=70, memory_bytes=16 * GIB, free_bytes=15 * GIB)
    for index in range(2)
]
MACHINE = Machine(
    name="m", arch="x86_64", cpu="", memory_bytes=GIB, available_bytes=GIB, cpu_limit=1.5,
    nodes=[CpuNode(id=n, cpus=[2 * n, 2 * n + 1], cores=2, memory_bytes=1, free_bytes=1)
           for n in range(2)],
    gpus=GPUS,
    links=[Link(a=0, b=1, kind="host", bandwidth=1.0, peer=False)],
)  # fmt: skip


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def found(check: Any, sight: Sight) -> dict[str, tuple[str, str]]:
    return {each.what: (each.level, each.remedy) for each in check(sight)}


def only(findings: dict[str, tuple[str, str]], part: str) -> tuple[str, str]:
    matches = [value for what, value in findings.items() if part in what]
    assert len(matches) == 1, (part, findings)
    return matches[0]


def with_driver(monkeypatch: pytest.MonkeyPatch, cards: list[Fake]) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda path: FakeNvml(cards))


def test_cards_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.nvml, "LIBRARIES", ("libnothing.so",))
    assert only(found(doctor.driver, Sight(MACHINE, tmp_path)), "no NVIDIA GPU")[0] == "note"
    write(tmp_path, "sys/bus/pci/devices/0000:04:00.0/vendor", "0x10de\n")
    write(tmp_path, "sys/bus/pci/devices/0000:04:00.0/class", "0x030200\n")
    level, remedy = only(found(doctor.driver, Sight(MACHINE, tmp_path)), "0000:04:00.0")
    assert level == "fault"
    assert "--device cpu" in remedy


def test_what_the_driver_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bus in range(4):
        write(tmp_path, f"sys/bus/pci/devices/0000:0{bus}:00.0/vendor", "0x10de\n")
        write(tmp_path, f"sys/bus/pci/devices/0000:0{bus}:00.0/class", "0x030200\n")
    cards = [
        Fake(persistence=0, processes={2**22 + 1: 3 * GIB, os.getpid(): GIB}),
        Fake(mode=2, memory=(16 * GIB, 12 * GIB)),
        Fake(arch=(6, 1)),
    ]
    with_driver(monkeypatch, cards)
    seen = found(doctor.driver, Sight(MACHINE, tmp_path))
    assert only(seen, "driver 550.54.15, CUDA 12.4") == ("ok", "")
    assert only(seen, "1 of 4 GPUs on the bus do not answer")[0] == "slow"
    assert "nvidia-smi -pm 1" in only(seen, "the driver lets go of it")[1]
    assert only(seen, f"process {2**22 + 1} 3.0 GiB")[0] == "note"
    assert only(seen, "forbids all use") == ("fault", "nvidia-smi -i 1 -c DEFAULT")
    assert "drop_caches" in only(seen, "4.0 GiB are in use and no process")[1]
    assert only(seen, "compute capability 6.1")[0] == "note"


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["GPU 0 (Tesla)", "GPU 1 (Tesla)", "GPU 2 (Tesla)"]),
        ("2,1", ["GPU 0 (Tesla, not visible)", "GPU 1 (Tesla)", "GPU 2 (Tesla, here cuda:0)"]),
        ("", [f"GPU {index} (Tesla, not visible)" for index in range(3)]),
    ],
)
def test_cards_have_both_numbers_where_they_differ(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]
) -> None:
    """The driver's, which nvidia-smi takes, and CUDA's, which --device takes."""
    with_driver(
        monkeypatch,
        [Fake(name="Tesla", bus=f"0000:0{bus}:00.0", persistence=0) for bus in range(3)],
    )
    gpus, _ = probe_gpus(Path("/nowhere"), visible)
    seen = found(doctor.driver, Sight(msgspec.structs.replace(MACHINE, gpus=gpus)))
    told = [what.rpartition(": ")[0] for what in seen if "lets go of it" in what]
    assert told == names


def test_an_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml([])
    monkeypatch.setattr(doctor, "LEAST_CUDA", (12, 8))
    monkeypatch.setattr("ctypes.CDLL", lambda path: library)
    seen = found(doctor.driver, Sight(MACHINE, Path("/nowhere")))
    assert only(seen, "CUDA 12.4: CUDA 12.8 is the least")[0] == "fault"


def test_peers() -> None:
    assert only(found(doctor.peers, Sight(MACHINE)), "GPUs cuda:0-1 do not reach")[0] == "slow"
    link = Link(a=0, b=1, kind="nvlink", bandwidth=1.0)
    linked = msgspec.structs.replace(MACHINE, links=[link])
    assert only(found(doctor.peers, Sight(linked)), "all 2 GPUs reach")[0] == "ok"
    assert found(doctor.peers, Sight(msgspec.structs.replace(MACHINE, gpus=GPUS[:1]))) == {}


@pytest.mark.parametrize(
    ("library", "can", "level", "part"),
    [(None, True, "slow", "libnuma does not work"), (1, False, "slow", "mbind is refused"),
     (1, True, "ok", "memory can be placed on 2")],
)  # fmt: skip
def test_placing(
    monkeypatch: pytest.MonkeyPatch, library: Any, can: bool, level: str, part: str
) -> None:
    monkeypatch.setattr(doctor.numa, "libnuma", lambda: library)
    monkeypatch.setattr(doctor.numa, "place", lambda *args: can)
    other = MemoryNode(id=255, memory_bytes=GIB, free_bytes=0, is_gpu=True)
    machine = msgspec.structs.replace(MACHINE, memory_nodes=[other])
    seen = found(doctor.placing, Sight(machine))
    found_level, remedy = only(seen, part)
    assert found_level == level
    assert ("--cap-add SYS_NICE" in remedy) == (level != "ok")
    assert only(seen, "node 255 (a GPU's memory, 1.0 GiB in use) is never chosen")[0] == "note"


@pytest.mark.parametrize(
    ("free", "level"), [(10 << 20, "fault"), (60 << 20, "slow"), (2 * GIB, "ok")]
)
def test_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, level: str
) -> None:
    there = SimpleNamespace(f_bavail=free >> 12, f_blocks=3 * GIB >> 12, f_frsize=4096)
    monkeypatch.setattr(doctor.os, "statvfs", lambda path: there)
    seen = found(doctor.shared_memory, Sight(MACHINE, shm=tmp_path))
    found_level, remedy = only(seen, f"{free >> 20} of 3072 MiB free")
    assert found_level == level
    assert ("--shm-size" in remedy) == (level != "ok")


def test_shared_memory_without_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tmpfs tells of size=0."""
    there = SimpleNamespace(f_bavail=0, f_blocks=0, f_frsize=4096)
    monkeypatch.setattr(doctor.os, "statvfs", lambda path: there)
    seen = found(doctor.shared_memory, Sight(MACHINE, shm=tmp_path))
    assert only(seen, "has no limit")[0] == "ok"


def test_shared_memory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: not mode & os.W_OK)
    seen = found(doctor.shared_memory, Sight(MACHINE, shm=tmp_path))
    level, remedy = only(seen, "cannot write there")
    assert level == "fault"
    assert "remount,rw" in remedy


def test_segments_of_the_dead_and_of_the_living(tmp_path: Path) -> None:
    assert "does not exist" not in str(found(doctor.shared_memory, Sight(MACHINE, shm=FOLDER)))
    name = f"test-{secrets.token_hex(6)}"
    code = (
        "import os; from voltapile.shm.segment import Segment; "
        f"s = Segment.create({name!r}, 'x', 64); os.kill(os.getpid(), {signal.SIGKILL.value})"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60)
    path = FOLDER / f"voltapile-{name}-x"
    try:
        told = [each for each in doctor.shared_memory(Sight(MACHINE)) if name in each.what]
        assert [each.level for each in told] == ["note"]
        assert path.exists()  # looking changes nothing
    finally:
        path.unlink(missing_ok=True)
    missing = found(doctor.shared_memory, Sight(MACHINE, shm=tmp_path / "missing"))
    assert only(missing, "No such file")[0] == "fault"


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {resource.RLIMIT_MEMLOCK: 64 << 10, resource.RLIMIT_NOFILE: 1024}
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda what: (values[what], values[what]))
    seen = found(doctor.limits, Sight(MACHINE))
    level, remedy = only(seen, "ulimit -l is 64 KiB")
    assert level == "slow"
    assert "LimitMEMLOCK=infinity" in remedy
    assert only(seen, "ulimit -n is 1024")[0] == "note"
    assert only(seen, "a control group allows 1.5 of 4 cores' time")[0] == "note"
    values[resource.RLIMIT_MEMLOCK] = resource.RLIM_INFINITY
    assert only(found(doctor.limits, Sight(MACHINE)), "locked memory: unlimited")[0] == "ok"


def test_kernel_settings(tmp_path: Path) -> None:
    assert found(doctor.kernel, Sight(MACHINE, tmp_path)) == {}
    write(tmp_path, "proc/sys/kernel/numa_balancing", "1\n")
    write(tmp_path, "proc/sys/vm/zone_reclaim_mode", "1\n")
    write(tmp_path, "proc/sys/vm/overcommit_memory", "2\n")
    governor = "sys/devices/system/cpu/cpu{}/cpufreq/scaling_governor"
    write(tmp_path, governor.format(0), "performance\n")
    write(tmp_path, governor.format(3), "powersave\n")
    seen = found(doctor.kernel, Sight(MACHINE, tmp_path))
    assert {level for level, _ in seen.values()} == {"slow"}
    assert only(seen, "moves pages")[1] == "sysctl kernel.numa_balancing=0"
    assert "performance" in only(seen, "governor of CPUs is performance, powersave")[1]
    assert len(seen) == 4


def test_huge_pages(tmp_path: Path) -> None:
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]")
    seen = found(doctor.huge_pages, Sight(MACHINE, tmp_path))
    assert only(seen, "for --no-mmap")[1].startswith("echo madvise >")


def test_everything_is_asked_of_this_computer() -> None:
    from voltapile.topology.machine import probe

    findings = list(examine(Sight(probe())))
    assert findings
    assert len(CHECKS) == 7
    assert all(isinstance(each, Finding) and "\n" not in each.what for each in findings)
