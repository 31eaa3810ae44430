"""Segment: a named piece of shared host memory; NUMA placement and huge pages on request.

A file in /dev/shm that only its user can open. The creator holds a lock on it while it lives, so
that whatever is left of a killed one is recognised and removed by the next create. Who must not
meet an earlier run's memory has a number of this run in its name, as groups do. Knows nothing of
what lies inside.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from voltapile.shm import huge as huge_pages
from voltapile.shm import numa

log = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")
PREFIX = "voltapile-"
HUGE_PAGE = 2 << 20
NOT_OURS = "its owner or root can remove it; a Plan with another --endpoint has other names"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


class SegmentError(OSError):
    """Shared memory that cannot be made or found."""


class Segment:
    """`create` on one side, `open` on the others."""

    def __init__(self, path: Path, descriptor: int, mapped: mmap.mmap, is_owner: bool) -> None:
        self.path = path
        self.is_owner = is_owner
        self.nbytes = len(mapped)
        self._descriptor = descriptor  # the owner's keeps its lock
        self._map = mapped
        self._bytes: np.ndarray | None = np.frombuffer(mapped, np.uint8)

    @classmethod
    def create(
        cls, plan_id: str, name: str, nbytes: int, *, nodes: Sequence[int] = (), huge: bool = False
    ) -> Segment:
        """Zeroed memory. nodes: bind to one CPU node or interleave over several; where that is
        refused, their CPUs touch it first. huge: ask for huge pages. Raises SegmentError, also when
        memory is short."""
        assert nbytes > 0
        remove_stale()
        path = _path(plan_id, name)
        descriptor = _create_locked(path)
        size = -(-nbytes // HUGE_PAGE) * HUGE_PAGE if huge else nbytes
        try:
            os.ftruncate(descriptor, size)
            mapped = mmap.mmap(descriptor, size)
            # Policy and huge pages first: they rule the pages that fallocate takes.
            segment = cls(path, descriptor, mapped, is_owner=True)
            if nodes:
                numa.place(segment.address, size, nodes)
            if huge:
                _advise_huge(mapped, path)
            _take(descriptor, size, nodes)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise SegmentError(f"{path}: {size} bytes of shared memory: {_told(error)}") from None
        return segment

    @classmethod
    def open(cls, plan_id: str, name: str, nbytes: int) -> Segment:
        """What another process created with at least `nbytes`. Raises SegmentError."""
        path = _path(plan_id, name)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise SegmentError(f"{path}: {error.strerror}") from None
        try:
            there = os.fstat(descriptor)
            if there.st_uid != os.getuid():  # who could read and change what we compute
                raise SegmentError(f"{path}: it is user {there.st_uid}'s; {NOT_OURS}")
            size = there.st_size
            if size < nbytes:
                raise SegmentError(f"{path}: found {size} bytes, expected at least {nbytes}")
            mapped = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        return cls(path, -1, mapped, is_owner=False)

    @property
    def address(self) -> int:
        """Where the memory lies in this process."""
        return int(self.array(np.uint8, (self.nbytes,)).ctypes.data)

    def array(self, dtype: Any, shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
        """A view of the memory; it keeps the mapping alive."""
        assert self._bytes is not None, "the segment has been closed"
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        assert 0 <= offset <= offset + count * kind.itemsize <= self.nbytes, "outside the segment"
        part = self._bytes[offset : offset + count * kind.itemsize]
        typed: np.ndarray = part.view(kind).reshape(shape)
        return typed

    def unlink(self) -> None:
        """Remove the name; the memory lives on while someone has it mapped."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the memory (views of it stay valid); the owner removes the name too."""
        if self._bytes is None:
            return
        self._bytes = None
        if self.is_owner:
            self.unlink()
            os.close(self._descriptor)
        with contextlib.suppress(BufferError):  # a view is still in use
            self._map.close()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_stale() -> list[str]:
    """Remove this user's segments whose creators have died; returns their names."""
    removed = [path.name for path in FOLDER.glob(f"{PREFIX}*") if is_stale(path, removes=True)]
    if removed:
        log.info("removed shared memory of dead processes: %s", ", ".join(removed))
    return removed


def is_stale(path: Path, removes: bool = False) -> bool:
    """Whether it is this user's and its creator has died; it is removed then, if wanted."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # gone meanwhile, or another user's
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if removes:
            path.unlink(missing_ok=True)
    except OSError:
        return False  # its creator lives
    finally:
        os.close(descriptor)
    return True


def _path(plan_id: str, name: str) -> Path:
    assert _NAME.fullmatch(plan_id), plan_id
    assert _NAME.fullmatch(name), name
    return FOLDER / f"{PREFIX}{plan_id}-{name}"


def _create_locked(path: Path) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise SegmentError(f"{path}: {_owner(path)}") from None
        except OSError as error:
            hint = "voltapile doctor tells what to change"
            raise SegmentError(f"{path}: {error.strerror}; {hint}") from None
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # a remove_stale came between open and lock


def _owner(path: Path) -> str:
    """Of one that is in the way."""
    try:
        user = path.lstat().st_uid
    except OSError:  # it was
        user = os.getuid()
    if user != os.getuid():
        return f"it is user {user}'s; {NOT_OURS}"
    return "another running process has this segment"


def _take(descriptor: int, size: int, nodes: Sequence[int]) -> None:
    """Have the pages now, since touching later what tmpfs cannot give would kill the process."""
    if len(nodes) == 0:
        os.posix_fallocate(descriptor, 0, size)
        return
    for place, node in enumerate(nodes):

        def touch(place: int = place) -> None:
            for start in range(place * HUGE_PAGE, size, len(nodes) * HUGE_PAGE):
                os.posix_fallocate(descriptor, start, min(HUGE_PAGE, size - start))

        numa.on_node(node, touch)


def _told(error: OSError) -> str:
    """What is missing, and what would help."""
    text = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
        return text
    try:
        there = os.statvfs(FOLDER)
    except OSError:
        return text
    free, total = there.f_bavail * there.f_frsize, there.f_blocks * there.f_frsize
    return (
        f"{text}: {_size(free)} of {_size(total)} of {FOLDER} are free; "
        f"mount -o remount,size=... {FOLDER}, or --shm-size for a container"
    )


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def _advise_huge(mapped: mmap.mmap, path: Path) -> None:
    fault = huge_pages.shared_fault()
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        fault = fault or str(error.strerror)
    if fault:
        log.info("%s: no huge pages: %s", path, fault)
