"""How much of a prompt has been computed, told while it is being computed (return_progress).

It looks at the generations a few times a second, since the engine tells only tokens. It knows
neither the shape of an event nor who reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from voltapile.gateway.api.generate import Generation
from voltapile.gateway.api.sse import EventStream

LOOK_SECONDS = 0.1

Describe = Callable[[Generation, dict[str, int]], Any]


@contextlib.asynccontextmanager
async def progress_told(
    events: EventStream, generations: list[Generation], describe: Describe
) -> AsyncIterator[None]:
    """Inside the block an event for each step of a prompt: `describe(generation, progress)`."""
    task = asyncio.create_task(_tell(events, generations, describe))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await task


async def _tell(events: EventStream, generations: list[Generation], describe: Describe) -> None:
    told: dict[int, int] = {}
    while waiting := [each for each in generations if not each.has_begun]:
        for generation in waiting:
            progress = generation.progress()
            if told.get(generation.index) != progress["processed"]:
                told[generation.index] = progress["processed"]
                await events.send(describe(generation, progress))
        await asyncio.sleep(LOOK_SECONDS)
