"""The drive that a file lies on: what it is, and how fast it reads.

Read past the page cache, so that the drive answers and not memory. Knows no model.
"""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE, THREADS = 8 << 20, 4
SECONDS = 0.5


def name_of(file: Path, root: Path = Path("/")) -> str:
    """The block device, and whether it turns: "nvme0n1 (no moving parts)"; "" where none is told,
    as for a network's files or a container's layers."""
    try:
        device = os.stat(file).st_dev
    except OSError:
        return ""
    folder = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    if not folder.exists():
        return ""
    folder = folder.resolve()
    if (folder / "partition").exists():
        folder = folder.parent
    try:
        turns = (folder / "queue/rotational").read_text().strip()
    except OSError:
        return folder.name
    return f"{folder.name} ({'it turns' if turns == '1' else 'no moving parts'})"


def measure(file: Path, seconds: float = SECONDS) -> float:
    """Bytes a second, at most so long; 0: the file is small, or its system cannot be asked."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return 0.0
    try:
        pieces = os.fstat(descriptor).st_size // PIECE
        if pieces < THREADS:
            return 0.0
        began = time.perf_counter()

        def read(first: int) -> int:
            room, done = mmap.mmap(-1, PIECE), 0
            for piece in range(first, pieces, THREADS):
                done += os.preadv(descriptor, [room], piece * PIECE)
                if time.perf_counter() - began > seconds:
                    break
            return done

        with ThreadPoolExecutor(THREADS, "drive") as threads:
            done = sum(threads.map(read, range(THREADS)))
        return done / (time.perf_counter() - began)
    except OSError:
        return 0.0
    finally:
        os.close(descriptor)
