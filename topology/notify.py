"""What a service tells systemd: that it is ready, that it lives, how far it is.

Whoever starts a process says where to tell it (`--notify ${NOTIFY_SOCKET}` in a unit). Nothing is
waited for, and nobody need listen. Only a loop that goes round may call `beat`, since systemd ends
a service that stays silent.
"""

from __future__ import annotations

import contextlib
import socket
import time

BEAT_SECONDS = 1.0  # between two signs of life


class Notifier:
    """address: a datagram socket's path, or "@" and a name; "": nobody listens."""

    def __init__(self, address: str = "") -> None:
        self._address = address.replace("@", "\0", 1) if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address else None
        self._next_beat = self._next_status = 0.0
        self._owed = ""  # what must be heard, once there is room for it
        if self._socket is not None:
            self._socket.setblocking(False)

    def ready(self, status: str = "") -> None:
        self._owed = f"READY=1\nSTATUS={status}"
        self.beat()

    def status(self, text: str) -> None:
        """How far it is, for people; as often as you like."""
        if time.monotonic() >= self._next_status:
            self._next_status = time.monotonic() + BEAT_SECONDS
            self._tell(f"STATUS={text}")

    def beat(self) -> None:
        """The loop goes round; as often as you like."""
        if self._owed and self._tell(self._owed):
            self._owed = ""
        if self._socket is not None and time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_SECONDS
            self._tell("WATCHDOG=1")

    def stopping(self) -> None:
        self._tell("STOPPING=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, text: str) -> bool:
        """Whether it has been taken: a queue holds few messages, and nothing waits for room."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(text.encode(), self._address)
                return True
        return False
