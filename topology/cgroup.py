"""Limits of the control groups that this process is in, versions 1 and 2.

A container sees its own group as the root of the mount or below a path of the host, so every
folder from the named one up to the mount is asked, and the narrowest answer counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 60  # version 1 writes a number near 2^63 for "no limit"


@dataclass(frozen=True)
class MemoryLimit:
    total: int
    available: int


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The narrowest memory limit, and what is left of it; None without one."""
    found = [
        limit
        for folder, version in _folders(root, "memory")
        if (limit := _memory(folder, version)) is not None
    ]
    if not found:
        return None
    return MemoryLimit(min(each.total for each in found), min(each.available for each in found))


def cpu_limit(root: Path = Path("/")) -> float:
    """CPUs' worth of time that the process may use; 0 without a limit."""
    limits = []
    for folder, version in _folders(root, "cpu"):
        if version == 2:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota = _text(folder / "cpu.cfs_quota_us")
            period = _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            limits.append(int(quota) / int(period))
    return min(limits, default=0.0)


def _memory(folder: Path, version: int) -> MemoryLimit | None:
    limit_name, usage_name = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    limit = _number(_text(folder / limit_name))
    if limit is None or limit >= UNLIMITED:
        return None
    stat = {
        name: int(value)
        for name, _, value in (line.partition(" ") for line in _lines(folder / "memory.stat"))
        if value.isdigit()
    }
    prefix = "total_" if "total_inactive_file" in stat else ""
    cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    used = max(0, (_number(_text(folder / usage_name)) or 0) - cache)  # the cache gives way
    return MemoryLimit(limit, max(0, limit - used))


def _folders(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Folders of this process's group for `controller`, inner first, with the version."""
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            yield from ((folder, 2) for folder in _upwards(mount, path))
        elif controller in controllers.split(","):
            for name in dict.fromkeys((controllers, controller)):
                yield from ((folder, 1) for folder in _upwards(mount / name, path))


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
