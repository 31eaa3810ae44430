"""What is told of a drive; the speed itself is this computer's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from voltapile.topology import drive


@pytest.mark.parametrize(("turns", "text"), [("0", "no moving parts"), ("1", "it turns")])
def test_the_disk_of_a_partition_is_named(tmp_path: Path, turns: str, text: str) -> None:
    device = tmp_path.stat().st_dev
    disk = tmp_path / "devices/nvme0n1"
    (disk / "queue").mkdir(parents=True)
    (disk / "queue/rotational").write_text(f"{turns}\n")
    (disk / "nvme0n1p2").mkdir()
    (disk / "nvme0n1p2/partition").write_text("2\n")
    link = tmp_path / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(disk / "nvme0n1p2")
    assert drive.name_of(tmp_path, tmp_path) == f"nvme0n1 ({text})"


def test_unknown_drives(tmp_path: Path) -> None:
    assert drive.name_of(tmp_path / "missing") == ""
    assert drive.name_of(tmp_path, tmp_path) == ""
    assert drive.measure(tmp_path / "missing") == 0.0
    (tmp_path / "small").write_bytes(b"x" * 5000)
    assert drive.measure(tmp_path / "small") == 0.0


def test_a_large_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(5 * drive.PIECE)
    assert 0 <= drive.measure(path, 0.05) < 1e12  # 0 where its system refuses
