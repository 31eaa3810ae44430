"""Renderer: the process that renders chat templates (sandbox.py), started, asked, and replaced.

Whatever a template does, an answer or a TemplateError is here in bounded time, and the gateway has
lost nothing. Safe to use from several threads, one at a time. It knows nothing of messages.
"""

from __future__ import annotations

import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

MAX_SECONDS = 2.0  # of processor time
PATIENCE = 20.0  # seconds by the clock, as the machine may be busy
LENGTH = struct.Struct("<I")
COMMAND = (sys.executable, "-m", "voltapile.gateway.sandbox")


class TemplateError(ValueError):
    """A template that cannot be read, or that fails on these messages; the text says why."""


class Renderer:
    """patience: seconds by the clock that a text may take in all."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._lock = threading.Lock()
        self._start()

    def check(self, source: str) -> None:
        """Raises TemplateError if it cannot be compiled."""
        self._answer(source, None, MAX_SECONDS)

    def render(
        self, source: str, variables: Mapping[str, Any], seconds: float = MAX_SECONDS
    ) -> str:
        """variables: what JSON can say. Raises TemplateError, which may be shown to the caller."""
        return self._answer(source, variables, seconds)

    def close(self) -> None:
        """End the process; the next text starts another."""
        self._end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _answer(self, source: str, variables: Mapping[str, Any] | None, seconds: float) -> str:
        try:
            data = json.dumps([source, variables, seconds]).encode()
        except RecursionError as error:
            raise TemplateError("the messages are nested too deeply") from error
        with self._lock:
            if self._process.poll() is not None:
                self._end()
                self._start()
            kind, text = json.loads(self._ask(data))
            if kind == "full":
                self._end()
        if kind != "text":
            raise TemplateError(text)
        return str(text)

    def _ask(self, data: bytes) -> bytes:
        end = time.monotonic() + self._patience
        try:
            self._socket.settimeout(self._patience)
            self._socket.sendall(LENGTH.pack(len(data)) + data)
            return self._take(LENGTH.unpack(self._take(LENGTH.size, end))[0], end)
        except (OSError, EOFError) as error:
            raise TemplateError(self._end(isinstance(error, TimeoutError))) from error

    def _take(self, count: int, end: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._socket.settimeout(max(1e-3, end - time.monotonic()))
            piece = self._socket.recv(min(count - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def _start(self) -> None:
        """Raises OSError."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C is for us.
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                COMMAND, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
            )
        self._finalizer = weakref.finalize(self, _end, self._process, self._socket)

    def _end(self, was_late: bool = False) -> str:
        """End the process; returns why it had ended or has to."""
        self._finalizer()
        code = self._process.returncode
        if was_late or -code in (signal.SIGPROF, signal.SIGVTALRM):
            return "it takes too long"
        return f"its process ended with {code}"


def _end(process: subprocess.Popen[bytes], end: socket.socket) -> None:
    end.close()
    try:
        process.wait(0.1)  # it ends by itself where nobody listens any more
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
