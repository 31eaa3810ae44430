"""Guides at work: after each token the next mask is computed, and the request may go on.

At once where that is known to be quick, since two threads that wake each other cost more than most
masks; otherwise in a thread, while steps run (llguidance lets go of Python meanwhile), and masks of
grammars that have slow ones in another, so that none waits behind them. It knows which request
waits for what, and tells when it has come; when rows are sent is the scheduler's affair.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread

import numpy as np
from voltapile.gateway.grammar import GrammarError
from voltapile.gateway.request import Chunk, Request, State

QUICK_SECONDS = 3e-4  # that all masks of a Result together may take of the event loop
SLOW_SECONDS = 2e-3  # no mask of a grammar of which one takes longer is computed there


_Asked = SimpleQueue[tuple[Request, list[int]] | None]


class Guides:
    """go_on() is called when a mask has come later, fail(request, why, finish) when there is none:
    "refused" if the grammar is at fault.

    Threads and queues of its own: an executor's futures cost as much as a mask.
    """

    def __init__(
        self, go_on: Callable[[], None], fail: Callable[[Request, str, str], None]
    ) -> None:
        self._go_on, self._fail = go_on, fail
        self._usual: _Asked = SimpleQueue()
        self._slow: _Asked = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None  # once the threads are there

    def follow(self, chunks: Iterable[tuple[Request, Chunk]]) -> None:
        """What was generated, of all requests. Those with a quick mask have it on return."""
        left = QUICK_SECONDS
        for request, chunk in chunks:
            if request.guide is None or not chunk.tokens or chunk.finish:
                continue
            loop = self._loop or self._start()
            is_slow = request.guide.pace.worst > SLOW_SECONDS
            if not is_slow and request.guide.seconds < left:
                left -= request.guide.seconds
                found = _advanced(request, chunk.tokens)
                if isinstance(found, np.ndarray):
                    request.mask = found
                else:  # the chunk is on its way to its reader
                    loop.call_soon(self._take, request, found)
            else:
                (self._slow if is_slow else self._usual).put((request, chunk.tokens))

    def close(self) -> None:
        """What has not begun is not computed any more."""
        for asked in (self._usual, self._slow):
            with suppress(Empty):
                while True:
                    asked.get_nowait()
            asked.put(None)

    def _start(self) -> asyncio.AbstractEventLoop:
        loop = self._loop = asyncio.get_running_loop()
        for name, asked in (("grammar", self._usual), ("slow grammar", self._slow)):
            Thread(target=self._work, args=[loop, asked], name=name, daemon=True).start()
        return loop

    def _work(self, loop: asyncio.AbstractEventLoop, asked: _Asked) -> None:
        while (each := asked.get()) is not None:
            request, tokens = each
            found = _advanced(request, tokens)
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._take, request, found)

    def _take(self, request: Request, found: np.ndarray | BaseException) -> None:
        if request.state is State.FINISHED:
            return
        if isinstance(found, GrammarError):
            self._fail(request, str(found), "refused")
        elif isinstance(found, BaseException):
            self._fail(request, f"the grammar cannot be followed: {found}", "error")
        else:
            request.mask = found
            self._go_on()


def _advanced(request: Request, tokens: list[int]) -> np.ndarray | BaseException:
    """The next mask, or why there is none."""
    guide = request.guide
    assert guide is not None
    began = time.thread_time()  # it is not the mask's fault if others have the CPU
    try:
        found = guide.advance(tokens)
    except BaseException as error:  # Rust's panics, too, or all others wait for ever
        return error
    guide.seconds = time.thread_time() - began
    guide.pace.note(guide.seconds)
    return found
