"""From generations to an HTTP response, streamed or whole.

What /v1/chat/completions and /v1/completions share: envelope, usage, events, clean-up. How one
choice looks is the endpoint's own (Shape).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing
from typing import Any, Protocol

from aiohttp import web
from voltapile.gateway.api.errors import json_response
from voltapile.gateway.api.generate import Delta, Generation, Outcome, merged, usage
from voltapile.gateway.api.options import Options
from voltapile.gateway.api.services import Services
from voltapile.gateway.api.sse import EventStream


class Shape(Protocol):
    """How an endpoint writes its choices."""

    id_prefix: str
    object: str
    chunk_object: str

    def choice(self, outcome: Outcome) -> dict[str, Any]: ...

    def events(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices to send for `delta`, one an event; the last one carries its finish."""


async def answer(
    request: web.Request,
    services: Services,
    shape: Shape,
    generations: list[Generation],
    options: Options,
) -> web.StreamResponse:
    """The response; the generations are closed whatever happens."""
    try:
        if options.stream:
            return await _streamed(request, services, shape, generations, options)
        return await _whole(services, shape, generations, options)
    finally:
        for generation in generations:
            generation.close()


async def _whole(
    services: Services, shape: Shape, generations: list[Generation], options: Options
) -> web.Response:
    outcomes = await asyncio.gather(*(generation.whole() for generation in generations))
    choices = [_with_tokens(shape.choice(outcome), outcome.tokens, options) for outcome in outcomes]
    body = _envelope(services, shape.id_prefix, shape.object)
    body |= {"choices": choices, "usage": usage(generations)}
    if len(generations) == 1:
        body["timings"] = generations[0].timings()
    return json_response(body)


async def _streamed(
    request: web.Request,
    services: Services,
    shape: Shape,
    generations: list[Generation],
    options: Options,
) -> web.StreamResponse:
    head = _envelope(services, shape.id_prefix, shape.chunk_object)
    events = EventStream(
        request,
        keepalive_seconds=services.keepalive_seconds,
        write_seconds=services.write_seconds,
    )
    async with events, aclosing(merged(generations)) as deltas:
        async for delta in deltas:
            choices = shape.events(delta)
            _with_tokens(choices[0], delta.tokens, options)
            payloads = [head | {"choices": [choice]} for choice in choices]
            if options.continuous_usage or options.include_usage:
                counts = usage(generations) if options.continuous_usage else None
                payloads = [payload | {"usage": counts} for payload in payloads]
            if delta.finish:
                payloads[-1]["timings"] = generations[delta.index].timings()
            await events.send(*payloads)
        if options.include_usage:
            await events.send(head | {"choices": [], "usage": usage(generations)})
        await events.done()
    return events.response


def _envelope(services: Services, id_prefix: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"{id_prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": services.plan.alias,
    }


def _with_tokens(choice: dict[str, Any], tokens: list[int], options: Options) -> dict[str, Any]:
    if options.return_tokens:
        choice["tokens"] = tokens
    return choice
