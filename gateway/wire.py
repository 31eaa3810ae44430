"""Wire: the gateway's end of ZeroMQ, a ROUTER socket read straight from the event loop.

zmq.asyncio wraps each message in futures, and pyzmq's multipart calls each frame in enums; both
cost more than the message. Here a readable descriptor is a call. It moves frames and knows neither
records nor workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

LINGER_MS = 200  # a Stop may still be on its way
BATCH = 64  # messages taken before others in the event loop have their turn
# Plain numbers, because the library's enums are slow.
NOW, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)

Frames = Sequence[bytes | memoryview]


class Wire:
    """take(sender, frames) is called for each message, in the event loop that opens this."""

    def __init__(self, endpoint: str, take: Callable[[str, list[bytes]], None]) -> None:
        self._endpoint, self._take = endpoint, take
        self._context = zmq.Context()
        self._looks_later = False

    def open(self) -> None:
        """Listen. Raises OSError."""
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, LINGER_MS)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)  # a new worker takes the name of a dead one
        try:
            self._socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(f"cannot listen at {self._endpoint}: {error}") from error
        self._receive = self._socket.recv  # pyzmq looks names up slowly
        self._polled = [(self._socket, int(zmq.POLLIN))]
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._read)

    def send(self, name: str, frames: Frames) -> None:
        """Never waits, as the queue has no limit; what is sent to nobody is dropped."""
        *first, last = [name.encode(), *frames]
        for frame in first:
            self._socket.send(frame, MORE)
        self._socket.send(last, NOW)
        self._look_later()

    def close(self) -> None:
        """What was sent leaves first, if the peers read it soon."""
        self._loop.remove_reader(self._descriptor)
        self._context.destroy(linger=LINGER_MS)

    def _read(self) -> None:
        if self._socket.closed:
            return
        self._looks_later = True  # what is sent meanwhile needs no further look
        receive = self._receive
        try:
            for _ in range(BATCH):
                sender = receive(NOW)
                frame = receive(NOW, copy=False)
                frames = [frame.bytes]
                while frame.more:  # they have all come when the first one has
                    frame = receive(NOW, copy=False)
                    frames.append(frame.bytes)
                self._take(sender.decode(errors="replace"), frames)
                if not zmq.zmq_poll(self._polled, 0):
                    return
        except zmq.Again:
            return  # the descriptor also tells of other news than messages
        finally:
            self._looks_later = False
        self._look_later()

    def _look_later(self) -> None:
        """The descriptor tells of news once only, and any call on the socket may be told it."""
        if not self._looks_later:
            self._looks_later = True
            self._loop.call_soon(self._read)
