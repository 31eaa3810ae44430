"""Guides at work: after each token the next mask is computed in a thread, while steps run.

It knows which request waits for what, and tells when it has come; when rows are sent is the
scheduler's affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from voltapile.gateway.request import Chunk, Request, State


class Guides:
    """go_on() is called when a mask has come, fail(request, why) when there is none."""

    def __init__(self, go_on: Callable[[], None], fail: Callable[[Request, str], None]) -> None:
        self._go_on, self._fail = go_on, fail
        self._pool = ThreadPoolExecutor(1, "grammar")  # its thread starts with the first task

    def follow(self, chunks: Iterable[tuple[Request, Chunk]]) -> None:
        """What was generated, of all requests."""
        for request, chunk in chunks:
            if request.guide is not None and chunk.tokens and not chunk.finish:
                loop = asyncio.get_running_loop()
                task = loop.run_in_executor(self._pool, request.guide.advance, chunk.tokens)
                task.add_done_callback(partial(self._take, request))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _take(self, request: Request, task: asyncio.Future[np.ndarray]) -> None:
        if task.cancelled() or (request.state is State.FINISHED and task.exception() is None):
            return
        error = task.exception()
        if error is None:
            request.mask = task.result()
            self._go_on()
        elif request.state is not State.FINISHED:
            self._fail(request, f"the grammar cannot be followed: {error}")
