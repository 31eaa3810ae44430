"""Limits of control groups, versions 1 and 2, as containers show them."""

from __future__ import annotations

from pathlib import Path

import pytest
from voltapile.topology.cgroup import MemoryLimit, cpu_limit, memory_limit

NO_LIMIT = "9223372036854771712"


def write(root: Path, groups: str, files: dict[str, str]) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_none(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    assert cpu_limit(tmp_path) == 0


def test_version_2_takes_the_narrowest(tmp_path: Path) -> None:
    files = {
        "memory.max": "5000",  # of the whole tree
        "memory.current": "100",
        "a/memory.max": "1000",
        "a/memory.current": "700",
        "a/memory.stat": "anon 200\ninactive_file 300\nactive_file 200",
        "a/b/memory.max": "max",
        "a/b/memory.current": "50",
        "a/cpu.max": "250000 100000",
        "a/b/cpu.max": "max 100000",
    }
    write(tmp_path, "0::/a/b\n", files)
    assert memory_limit(tmp_path) == MemoryLimit(1000, 800)
    assert cpu_limit(tmp_path) == 2.5


def test_version_1(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": NO_LIMIT,
        "memory/x/memory.limit_in_bytes": "2000",
        "memory/x/memory.usage_in_bytes": "900",
        "memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 50",
        "cpu,cpuacct/x/cpu.cfs_quota_us": "50000",
        "cpu,cpuacct/x/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    write(tmp_path, "4:memory:/x\n3:cpu,cpuacct:/x\n1:name=systemd:/y\n", files)
    assert memory_limit(tmp_path) == MemoryLimit(2000, 1250)
    assert cpu_limit(tmp_path) == 0.5


def test_a_container_that_sees_a_path_of_the_host(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": "3000", "memory/memory.usage_in_bytes": "1000"}
    write(tmp_path, "4:memory:/docker/0123\n", files)
    assert memory_limit(tmp_path) == MemoryLimit(3000, 2000)


@pytest.mark.parametrize("limit", ["max", NO_LIMIT, "rubbish", ""])
def test_no_limit(tmp_path: Path, limit: str) -> None:
    write(tmp_path, "0::/\n", {"memory.max": limit, "memory.current": "5"})
    assert memory_limit(tmp_path) is None
