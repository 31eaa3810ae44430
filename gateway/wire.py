"""Wire: the gateway's end of ZeroMQ, a ROUTER that speaks ZMTP 3.0 from the event loop itself.

libzmq moves each message through a thread of its own, and those wake-ups cost more than everything
else that a token needs (docs/decisions.md). Workers use libzmq and see no difference. It moves
frames and knows neither records nor workers. The protocol: https://rfc.zeromq.org/spec/23
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

log = logging.getLogger(__name__)

LINGER_SECONDS = 0.2  # a Stop may still be on its way
MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame
GREETING = b"\xff\0\0\0\0\0\0\0\0\x7f" + b"\3\0" + b"NULL".ljust(52, b"\0")  # 3.0, no encryption
READY = b"\5READY"
OURS = READY + b"\x0bSocket-Type\0\0\0\6ROUTER"
MOST_BYTES = 1 << 30  # of a frame; who announces more does not speak as agreed

Frames = Sequence[bytes | memoryview]
Take = Callable[[str, list[bytes]], None]


class WireError(ValueError):
    """What no worker says."""


class Wire:
    """take(sender, frames) is called for each message, in the event loop that opens this."""

    def __init__(self, endpoint: str, take: Take) -> None:
        self.take = take
        self.named: dict[str, Peer] = {}
        self.connected: set[Peer] = set()
        self._endpoint = endpoint

    async def open(self) -> None:
        """Listen. Raises OSError."""
        loop = asyncio.get_running_loop()
        kind, _, address = self._endpoint.partition("://")
        host, _, port = address.rpartition(":")
        try:
            if kind == "ipc":
                path = address.replace("@", "\0", 1) if address.startswith("@") else address
                self._server = await loop.create_unix_server(lambda: Peer(self), path)
            elif kind == "tcp" and port.isdecimal():
                name = None if host == "*" else host.strip("[]")
                self._server = await loop.create_server(lambda: Peer(self), name, int(port))
            else:
                raise OSError("neither ipc://PATH nor tcp://HOST:PORT")
        except OSError as error:
            raise OSError(f"cannot listen at {self._endpoint}: {error}") from error

    def send(self, name: str, frames: Frames) -> None:
        """Never waits, as the queue has no limit; what is sent to nobody is dropped."""
        peer = self.named.get(name)
        if peer is not None:
            peer.send(frames)

    async def close(self) -> None:
        """What was sent leaves first, if the peers read it soon."""
        self._server.close()
        if self._endpoint.startswith("ipc://"):
            with contextlib.suppress(OSError, ValueError):
                Path(self._endpoint.removeprefix("ipc://")).unlink()
        for peer in list(self.connected):
            peer.transport.close()
        ends = [peer.ended for peer in self.connected]
        if ends:
            await asyncio.wait(ends, timeout=LINGER_SECONDS)
        for peer in list(self.connected):
            peer.transport.abort()


class Peer(asyncio.Protocol):
    """One connection. It has a name once both sides have said READY."""

    transport: asyncio.Transport

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._name = ""
        self._is_greeted = False
        self._frames: list[bytes] = []  # of a message that has not come whole
        self._rest = bytearray()  # of a frame that has not
        self.ended = asyncio.get_running_loop().create_future()

    def send(self, frames: Frames) -> None:
        last = len(frames) - 1
        parts: list[bytes | memoryview] = []
        for n, frame in enumerate(frames):
            parts += _head(MORE if n < last else 0, len(frame)), frame
        if not self.transport.is_closing():
            self.transport.write(b"".join(parts))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._wire.connected.add(self)
        self.transport.write(GREETING)

    def connection_lost(self, error: Exception | None) -> None:
        self._wire.connected.discard(self)
        if self._wire.named.get(self._name) is self:
            del self._wire.named[self._name]
        self.ended.set_result(None)

    def data_received(self, data: bytes) -> None:
        is_one = len(data) > 1 and data[0] == 0 and data[1] == len(data) - 2
        if is_one and self._name and not self._rest and not self._frames:
            self._wire.take(self._name, [data[2:]])  # a short message by itself, as most are
            return
        try:
            if self._rest:
                self._rest += data
                del self._rest[: self._read(self._rest)]
            elif (used := self._read(data)) < len(data):
                self._rest += data[used:]
        except WireError as error:
            log.warning("a connection that is no worker's: %s", error)
            self.transport.abort()

    def _read(self, data: bytes | bytearray) -> int:
        """Take the whole frames that `data` begins with; returns how many bytes they are."""
        at = 0 if self._is_greeted else self._greet(data)
        while self._is_greeted and len(data) - at > 1:
            flags, length, begin = data[at], data[at + 1], at + 2
            if flags & LONG:
                if len(data) - at < 9:
                    break
                length, begin = int.from_bytes(data[at + 1 : at + 9], "big"), at + 9
            if length > MOST_BYTES:
                raise WireError(f"a frame of {length} bytes")
            if len(data) - begin < length:
                break
            at = begin + length
            self._take(flags, bytes(data[begin:at]))
        return at

    def _greet(self, data: bytes | bytearray) -> int:
        if not GREETING.startswith(data[:1]):
            raise WireError("no greeting of ZeroMQ")
        if len(data) < len(GREETING):
            return 0
        if data[10] < 3 or not data[12:].startswith(b"NULL\0"):
            raise WireError("an old ZeroMQ, or one that encrypts")
        self._is_greeted = True
        self.transport.write(_head(COMMAND, len(OURS)) + OURS)
        return len(GREETING)

    def _take(self, flags: int, frame: bytes) -> None:
        if flags & COMMAND:
            if not self._name and frame.startswith(READY):
                self._enter(_identity(frame))
        elif self._name:
            self._frames.append(frame)
            if not flags & MORE:
                frames, self._frames = self._frames, []
                self._wire.take(self._name, frames)

    def _enter(self, name: str) -> None:
        """A new worker takes the name of a dead one."""
        self._name = name
        before = self._wire.named.get(name)
        self._wire.named[name] = self
        if before is not None:
            before.transport.abort()


def _head(flags: int, length: int) -> bytes:
    if length < 256:
        return bytes((flags, length))
    return bytes((flags | LONG,)) + length.to_bytes(8, "big")


def _identity(ready: bytes) -> str:
    """The property of that name in a READY; "" if there is none."""
    at = len(READY)
    while at < len(ready):
        key = at + 1
        size = key + ready[at]
        value = size + 4
        at = value + int.from_bytes(ready[size:value], "big")
        if ready[key:size].lower() == b"identity":
            return ready[value:at].decode(errors="replace")
    return ""
