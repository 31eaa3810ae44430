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
        self._next, self._status = 0.0, ""
        if self._socket is not None:
            self._socket.setblocking(False)

    def ready(self, status: str = "") -> None:
        self._tell(f"READY=1\nSTATUS={status}")

    def status(self, text: str) -> None:
        """How far it is, for people; as often as you like."""
        if text != self._status:
            self._status = text
            self._tell(f"STATUS={text}")

    def beat(self) -> None:
        """The loop goes round; as often as you like."""
        if self._socket is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + BEAT_SECONDS
            self._tell("WATCHDOG=1")

    def stopping(self) -> None:
        self._tell("STOPPING=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, text: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # nobody there, or its queue is full
                self._socket.sendto(text.encode(), self._address)
