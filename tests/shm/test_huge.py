"""What the kernel says of huge pages, and what would change it."""

from __future__ import annotations

from pathlib import Path

import pytest
from voltapile.shm.huge import SETTINGS, private_fault, shared_fault


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / SETTINGS).mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("chosen", "fault"),
    [
        ("always [madvise] never", ""),
        ("[always] madvise never", ""),
        ("always madvise [never]", "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"),
    ],
)
def test_private(root: Path, chosen: str, fault: str) -> None:
    (root / SETTINGS / "enabled").write_text(chosen)
    assert private_fault(root).endswith(fault)
    assert bool(private_fault(root)) == bool(fault)


@pytest.mark.parametrize(
    ("chosen", "mounted", "fault"),
    [
        ("advise [never] deny force", "rw,huge=advise", ""),
        ("advise [never] deny force", "rw,size=64k", "mount -o remount,huge=advise /dev/shm"),
        ("advise [never] deny force", "rw,huge=never", "mount -o remount,huge=advise /dev/shm"),
        ("advise never [deny] force", "rw,huge=always", "shmem_enabled"),
        ("advise never deny [force]", "rw", ""),
    ],
)
def test_shared(root: Path, chosen: str, mounted: str, fault: str) -> None:
    (root / SETTINGS / "shmem_enabled").write_text(chosen)
    (root / "proc/self/mounts").write_text(
        f"tmpfs /dev tmpfs rw 0 0\ntmpfs /dev/shm tmpfs {mounted} 0 0\n"
    )
    assert shared_fault(root).endswith(fault)
    assert bool(shared_fault(root)) == bool(fault)


def test_a_kernel_without(tmp_path: Path) -> None:
    assert private_fault(tmp_path) == "this kernel has none"
    assert shared_fault(tmp_path) == "this kernel gives none to shared memory"
