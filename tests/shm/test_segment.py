"""Segment: shared by two processes, private to its user, and removed when its creator has died."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from voltapile.shm import segment as module
from voltapile.shm.segment import HUGE_PAGE, Segment, SegmentError, remove_stale


@pytest.fixture
def plan_id() -> Iterator[str]:
    name = f"test-{secrets.token_hex(6)}"
    yield name
    assert not list(module.FOLDER.glob(f"voltapile-{name}*"))


def test_two_mappings_share_the_memory(plan_id: str) -> None:
    with Segment.create(plan_id, "x", 8192) as mine, Segment.open(plan_id, "x", 8192) as other:
        assert mine.array(np.uint8, (8192,)).max() == 0
        mine.array(np.float32, (2, 3), 64)[1, 2] = 2.5
        assert other.array(np.float32, (6,), 64).tolist() == [0, 0, 0, 0, 0, 2.5]
        assert mine.address != other.address
        assert stat.S_IMODE(mine.path.stat().st_mode) == 0o600


def python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_another_process_shares_the_memory(plan_id: str) -> None:
    with Segment.create(plan_id, "x", 4096) as segment:
        done = python(
            "from voltapile.shm.segment import Segment\n"
            f"with Segment.open({plan_id!r}, 'x', 4096) as segment:\n"
            "    segment.array('i8', (3,))[:] = [1, 2, 3]"
        )
        assert done.returncode == 0, done.stderr
        assert segment.array(np.int64, (4,)).tolist() == [1, 2, 3, 0]
        assert segment.path.exists()


def test_one_of_another_user_is_refused(plan_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has taken our name with a file that all may open would see and change what we do."""
    with Segment.create(plan_id, "x", 64):
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        for make in (Segment.create, Segment.open):
            with pytest.raises(SegmentError, match=f"it is user {user}'s; its owner or root can"):
                make(plan_id, "x", 64)


def test_a_name_in_use_is_refused(plan_id: str) -> None:
    with (
        Segment.create(plan_id, "x", 64),
        pytest.raises(SegmentError, match="another running process has this segment"),
    ):
        Segment.create(plan_id, "x", 64)


def test_open_checks_existence_and_size(plan_id: str) -> None:
    with pytest.raises(SegmentError, match="No such file"):
        Segment.open(plan_id, "x", 64)
    with (
        Segment.create(plan_id, "x", 64),
        pytest.raises(SegmentError, match="found 64 bytes, expected at least 65"),
    ):
        Segment.open(plan_id, "x", 65)


def test_more_than_there_is_fails_at_create(plan_id: str) -> None:
    with pytest.raises(SegmentError, match=f"{1 << 50} bytes of shared memory"):
        Segment.create(plan_id, "x", 1 << 50)


def test_views_outlive_close(plan_id: str) -> None:
    segment = Segment.create(plan_id, "x", 64)
    view = segment.array(np.int32, (4,))
    view[:] = 7
    segment.close()
    segment.close()
    assert view.tolist() == [7, 7, 7, 7]


def test_huge_pages_and_placement_are_only_wishes(plan_id: str) -> None:
    with Segment.create(plan_id, "x", 100, nodes=[0], huge=True) as segment:
        assert segment.nbytes == HUGE_PAGE
        segment.array(np.uint8, (segment.nbytes,))[-1] = 1


def test_memory_is_touched_first_by_the_cpus_of_its_nodes(
    plan_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where placing is refused, as in a container; the last piece may be smaller."""
    touched: list[tuple[int, int, int]] = []
    node = -1

    def on_node(number: int, call: Callable[[], None]) -> None:
        nonlocal node
        node = number
        call()

    monkeypatch.setattr(module.numa, "place", lambda *args: False)
    monkeypatch.setattr(module.numa, "on_node", on_node)
    allocate = os.posix_fallocate

    def take(descriptor: int, start: int, length: int) -> None:
        touched.append((node, start // HUGE_PAGE, length))
        allocate(descriptor, start, length)

    monkeypatch.setattr(module.os, "posix_fallocate", take)
    with Segment.create(plan_id, "x", 2 * HUGE_PAGE + 5, nodes=[0, 8]) as segment:
        assert segment.nbytes == 2 * HUGE_PAGE + 5
    assert touched == [(0, 0, HUGE_PAGE), (0, 2, 5), (8, 1, HUGE_PAGE)]


@pytest.mark.parametrize(
    ("unit", "shown"), [(20, "10 MiB of 64 MiB"), (13, "80 KiB of 512 KiB"), (0, "0 KiB of 0 KiB")]
)
def test_a_small_dev_shm_is_told_with_numbers(
    plan_id: str, monkeypatch: pytest.MonkeyPatch, unit: int, shown: str
) -> None:
    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", full)
    monkeypatch.setattr(
        module.os,
        "statvfs",
        lambda path: SimpleNamespace(f_bavail=10, f_blocks=64, f_frsize=1 << unit),
    )
    with pytest.raises(SegmentError) as caught:
        Segment.create(plan_id, "x", 80 << 20)
    assert str(caught.value).endswith(
        f"83886080 bytes of shared memory: No space left on device: {shown} of /dev/shm are "
        "free; mount -o remount,size=... /dev/shm, or --shm-size for a container"
    )


def test_huge_pages_that_are_not_there_are_one_line(
    plan_id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module.huge_pages, "shared_fault", lambda: "no, since")
    with caplog.at_level(logging.INFO), Segment.create(plan_id, "x", 5, huge=True):
        pass
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "no huge pages: no, since"
    ]


def test_what_a_killed_process_left_is_removed(plan_id: str) -> None:
    done = python(
        "import os; from voltapile.shm.segment import Segment; "
        f"s = Segment.create({plan_id!r}, 'x', 64); print(s.path, flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    path = Path(done.stdout.strip())
    assert path.exists()
    with Segment.create(plan_id, "y", 64) as alive:
        assert not path.exists()
        assert path.name not in remove_stale()
        assert alive.path.exists()
