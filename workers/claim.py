"""Claim: one process for each name on this machine, whatever files and segments are still there.

An abstract socket is bound to the name. The kernel frees it when the process ends, however that
happens, and tells whoever connects which process it is. Knows neither Boards nor plans.
"""

from __future__ import annotations

import os
import socket
import struct

UNKNOWN = -1  # a process that has been asked too often who it is
MOST_ASKED = 1024  # who asks is never answered, and so takes a place of the queue
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Claim:
    """Of a name. What `take` has taken is held until `close`, or the process's end."""

    def __init__(self, name: str) -> None:
        self._address = f"\0voltapile/{name}"
        self._descriptor, self._known = -1, 0

    def take(self) -> int:
        """0, or the process that holds it. Taking what this process holds is no matter."""
        if self._descriptor >= 0:
            return 0
        own = socket.socket(socket.AF_UNIX)
        try:
            own.bind(self._address)
            own.listen(MOST_ASKED)
        except OSError:
            own.close()
            self._known = self._known or self._holder()
            return 0 if self._known == os.getpid() else self._known
        self._descriptor = own.detach()
        return 0

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _holder(self) -> int:
        """0: nobody any more."""
        with socket.socket(socket.AF_UNIX) as caller:
            caller.setblocking(False)
            try:
                caller.connect(self._address)
            except BlockingIOError:
                return UNKNOWN
            except OSError:
                return 0
            told = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return int(_CREDENTIALS.unpack(told)[0])
