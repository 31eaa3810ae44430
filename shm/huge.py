"""Whether the kernel gives huge pages to those who ask, and what to change where it does not.

Private memory and files in /dev/shm have settings of their own. Knows no memory of ours.
"""

from __future__ import annotations

from pathlib import Path

SETTINGS = "sys/kernel/mm/transparent_hugepage"


def private_fault(root: Path = Path("/")) -> str:
    """Why private memory gets none; "" where it does."""
    chosen = _chosen(root / SETTINGS / "enabled")
    if chosen in ("always", "madvise"):
        return ""
    if not chosen:
        return "this kernel has none"
    return f"this kernel gives none: echo madvise > /{SETTINGS}/enabled"


def shared_fault(root: Path = Path("/")) -> str:
    """Why files in /dev/shm get none; "" where they do."""
    chosen = _chosen(root / SETTINGS / "shmem_enabled")
    if chosen == "force":
        return ""
    if chosen in ("", "deny"):
        text = f": echo advise > /{SETTINGS}/shmem_enabled" if chosen else ""
        return f"this kernel gives none to shared memory{text}"
    if _mount_option(root) in ("advise", "within_size", "always"):
        return ""
    return "/dev/shm is mounted without them: mount -o remount,huge=advise /dev/shm"


def _chosen(path: Path) -> str:
    """The word in brackets."""
    try:
        return path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def _mount_option(root: Path) -> str:
    try:
        lines = (root / "proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    found = ""
    for line in lines:
        _, place, _, options, *_ = [*line.split(), "", "", "", ""]
        if place == "/dev/shm":  # the last mount is the one that is seen
            found = next((o[5:] for o in options.split(",") if o.startswith("huge=")), "")
    return found
