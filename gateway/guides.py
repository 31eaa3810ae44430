"""Guides at work: after each token the next mask is computed in a thread, while steps run.

It knows which request waits for what, and tells when it has come; when rows are sent is the
scheduler's affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread

import numpy as np
from voltapile.gateway.request import Chunk, Request, State


class Guides:
    """go_on() is called when a mask has come, fail(request, why) when there is none.

    A thread and a queue of its own: an executor's futures cost as much as a mask.
    """

    def __init__(self, go_on: Callable[[], None], fail: Callable[[Request, str], None]) -> None:
        self._go_on, self._fail = go_on, fail
        self._asked: SimpleQueue[tuple[Request, list[int]] | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None  # once the thread is there

    def follow(self, chunks: Iterable[tuple[Request, Chunk]]) -> None:
        """What was generated, of all requests."""
        for request, chunk in chunks:
            if request.guide is not None and chunk.tokens and not chunk.finish:
                if self._loop is None:
                    self._loop = asyncio.get_running_loop()
                    Thread(
                        target=self._work, args=[self._loop], name="grammar", daemon=True
                    ).start()
                self._asked.put((request, chunk.tokens))

    def close(self) -> None:
        """What has not begun is not computed any more."""
        with suppress(Empty):
            while True:
                self._asked.get_nowait()
        self._asked.put(None)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (asked := self._asked.get()) is not None:
            request, tokens = asked
            assert request.guide is not None
            found: np.ndarray | BaseException
            try:
                found = request.guide.advance(tokens)
            except BaseException as error:  # Rust's panics, too, or all others wait for ever
                found = error
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._take, request, found)

    def _take(self, request: Request, found: np.ndarray | BaseException) -> None:
        if request.state is State.FINISHED:
            return
        if isinstance(found, BaseException):
            self._fail(request, f"the grammar cannot be followed: {found}")
        else:
            request.mask = found
            self._go_on()
