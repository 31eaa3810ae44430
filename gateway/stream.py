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
    """An asynchronous iterator of Chunk, for one reader; the last chunk has a finish."""

    def __init__(self, request: Request, cancel: Callable[[Request], None]) -> None:
        self.request = request
        self._cancel = cancel
        self._chunk: Chunk | None = None
        self._has_chunk = asyncio.Event()
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._ended:
            raise StopAsyncIteration
        await self._has_chunk.wait()
        chunk, self._chunk = self._chunk, None
        assert chunk is not None
        self._has_chunk.clear()
        self._ended = bool(chunk.finish)
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
        self._has_chunk.set()
