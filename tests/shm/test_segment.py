"""Segment: shared by two processes, private to its user, and removed when its creator has died."""

from __future__ import annotations

import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
