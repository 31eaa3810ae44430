"""Which signals end a worker. A worker of a gateway ends with it, however that ends."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable
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
