"""Stream: the reader's end of one generation.

Chunks that nobody took yet are merged, so a slow reader costs nothing and loses nothing. It knows
nothing of sockets or the scheduler; the engine puts chunks in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from voltapile.gateway.request import Chunk, Request


class Stream:
    """For one reader, who iterates over Chunks or listens; the last chunk has a finish."""

    def __init__(self, request: Request, cancel: Callable[[Request], None]) -> None:
        self.request = request
        self._cancel = cancel
        self._chunk: Chunk | None = None
        self._has_chunk = asyncio.Event()
        self._tell: Callable[[], None] = self._has_chunk.set
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._ended:
            raise StopAsyncIteration
        await self._has_chunk.wait()
        self._has_chunk.clear()
        chunk = self.take()
        assert chunk is not None
        self._ended = bool(chunk.finish)
        return chunk

    def listen(self, tell: Callable[[], None]) -> None:
        """Call `tell` whenever there is something to take, in the engine's own call: a task that
        wakes up costs more than a token. It must not raise."""
        self._tell = tell
        if self._chunk is not None:
            tell()

    def take(self) -> Chunk | None:
        """All that has come and nobody has taken."""
        chunk, self._chunk = self._chunk, None
        return chunk

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, known once the first chunk is here."""
        return self.request.cached

    def cancel(self) -> None:
        """The reader has left: slot and pages are free within one step. Safe to call always."""
        self._cancel(self.request)

    def put(self, chunk: Chunk) -> None:
        if self._chunk is None:
            self._chunk = chunk
        else:
            self._chunk.extend(chunk)
        self._tell()
