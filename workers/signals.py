"""Which signals end a worker, and the one by which it beats while it computes.

A worker of a gateway ends with it, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

PR_SET_PDEATHSIG = 1


def watch(stop: Callable[[int, FrameType | None], None], is_spawned: bool) -> None:
    """is_spawned: by a gateway."""
    signal.signal(signal.SIGTERM, stop)
    if not is_spawned:
        signal.signal(signal.SIGINT, stop)
        return
    # Ctrl-C reaches the whole foreground group; the gateway decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def beating(beat: Callable[[], None], seconds: float) -> Iterator[None]:
    """Calls `beat` while a step runs, too.

    Python runs a signal's handler between two instructions of the main thread, so the loop itself
    beats: a thread would go on beating for a loop that hangs.
    """
    before = signal.signal(signal.SIGALRM, lambda number, frame: beat())
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
