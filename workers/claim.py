"""Claim: one process of this user for each name, whatever files and segments are still there.

An abstract socket is bound to the name. The kernel frees it when the process ends, however that
happens, and tells whoever connects which process it is, and whose. Any user may take any name, so
this keeps us from our own mistakes alone: a stranger's hold is told and passed over. Knows neither
Boards nor plans.
"""

from __future__ import annotations

import logging
import os
import socket
import struct

log = logging.getLogger(__name__)

NOBODY, UNSEEN = 0, -1  # UNSEEN: a process of ours that has no number here, as in a container
MOST_ASKED = 1024  # each who asks has a place of the queue until `answer`
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Claim:
    """Of a name. What `take` has taken is held until `close`, or the process's end."""

    def __init__(self, name: str) -> None:
        self._address = f"\0voltapile/{name}"
        self._descriptor, self._known = -1, NOBODY

    def take(self) -> int:
        """NOBODY, or this user's process that holds it. Taking what this process holds is no
        matter."""
        if self._descriptor >= 0:
            return NOBODY
        own = socket.socket(socket.AF_UNIX)
        try:
            own.bind(self._address)
            own.listen(MOST_ASKED)
            own.setblocking(False)
        except OSError:
            own.close()
            self._known = self._known or self._holder()
            return NOBODY if self._known == os.getpid() else self._known
        self._descriptor = own.detach()
        return NOBODY

    def answer(self) -> None:
        """Let those go who have asked, so that the next ones can."""
        if self._descriptor < 0:
            return
        own = socket.socket(fileno=self._descriptor)
        try:
            while True:
                own.accept()[0].close()
        except OSError:  # nobody asks
            own.detach()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _holder(self) -> int:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.setblocking(False)
            try:
                caller.connect(self._address)
            except BlockingIOError:  # whoever it is, others have asked until nobody could
                return self._strange("does not say whose process it is")
            except OSError:
                return NOBODY  # any more
            told = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, user, _ = _CREDENTIALS.unpack(told)
        if user != os.getuid():
            return self._strange(f"is user {user}'s process {process}")
        return int(process) or UNSEEN

    def _strange(self, what: str) -> int:
        name = self._address[1:]
        log.warning("whoever holds the name %s %s: a second start would not be noticed", name, what)
        return NOBODY
