"""EventStream: a response of server-sent events.

Writes events without waiting, a comment when nothing was sent for a while (proxies close idle
connections), and gives up on a client that takes nothing. It does not know what it sends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from voltapile.gateway.api import codec
from voltapile.gateway.api.errors import ApiError, from_exception

log = logging.getLogger(__name__)

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events otherwise
}
COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
FULL = 64 << 10  # bytes that a client has not taken; aiohttp lets writers wait from there on


def event(payload: Any) -> bytes:
    return b"data: " + codec.dumps(payload) + b"\n\n"


def failure(error: ApiError) -> bytes:
    """The end of a stream that broke, as OpenAI's clients read it."""
    return event(error.body()) + DONE


class EventStream:
    """async with EventStream(request, ...) as events: events.write(event({...}))

    An exception inside becomes an error event, as the status has been sent. A client that leaves
    or does not read ends the block silently; `response` is what the handler returns.
    comment, failure: what is sent in a silence, and for an exception.
    """

    def __init__(
        self,
        request: web.Request,
        *,
        keepalive_seconds: float,
        write_seconds: float,
        comment: bytes = COMMENT,
        failure: Callable[[ApiError], bytes] = failure,
    ) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self._request = request
        self._keepalive_seconds = keepalive_seconds
        self._write_seconds = write_seconds
        self._comment, self._failure = comment, failure
        self._loop = asyncio.get_running_loop()
        self._sent = self._loop.time()
        self._writing = 0  # more than one when a comment meets an event

    async def __aenter__(self) -> Self:
        writer = await self.response.prepare(self._request)
        assert writer is not None
        if self._request.transport is None:
            raise ConnectionResetError("the client has left")
        writer.send_headers()  # the rest goes past it, since its `write` is a coroutine
        self._writer, self._transport = writer, self._request.transport
        self._is_chunked = self.response.headers.get("Transfer-Encoding") == "chunked"
        self._watch = asyncio.create_task(self._watch_clock())
        return self

    def write(self, data: bytes) -> bool:
        """Whole events, at once. False: the client does not read, so drain before the next.

        Raises ConnectionError if the client has left.
        """
        transport = self._transport
        if transport.is_closing():
            raise ConnectionResetError("the client has left")
        if not data:
            return True  # an empty chunk would be the last one
        self._sent = self._loop.time()
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        return transport.get_write_buffer_size() < FULL

    async def drain(self) -> None:
        """Waits while the client does not read; _watch_clock ends that."""
        self._writing += 1
        try:
            await self._writer.drain()
        finally:
            self._writing -= 1

    async def send(self, payload: Any) -> None:
        self.write(event(payload))
        await self.drain()

    async def done(self) -> None:
        self.write(DONE)
        await self.drain()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._watch.cancel()
        if isinstance(error, ConnectionError):
            return True
        if not isinstance(error, Exception):
            return False  # no error at all, or a cancellation
        try:
            self.write(self._failure(from_exception(error)))
            await self.drain()
        except ConnectionError:
            log.debug("nobody was left to tell: %s", error)
        return True

    async def _watch_clock(self) -> None:
        """Comments while nothing is sent, and an end to a write that gets nowhere."""
        while True:
            limit = self._write_seconds if self._writing else self._keepalive_seconds
            wait = self._sent + limit - self._loop.time()
            if wait > 0:
                await asyncio.sleep(min(wait, self._keepalive_seconds, self._write_seconds))
            elif self._writing:
                return self._drop()
            else:
                try:
                    self.write(self._comment)
                    async with asyncio.timeout(self._write_seconds):
                        await self.drain()
                except TimeoutError:
                    return self._drop()
                except ConnectionError:
                    return None  # the stream itself will find out

    def _drop(self) -> None:
        """The handler is cancelled, as if the client had left."""
        log.warning("a client did not read for %g s; closing", self._write_seconds)
        self._transport.abort()
