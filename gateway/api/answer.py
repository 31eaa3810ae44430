"""From generations to an HTTP response, streamed or whole.

What /v1/chat/completions and /v1/completions share: envelope, usage, events, clean-up. How one
choice looks is the endpoint's own (Shape).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from functools import partial
from typing import Any, Protocol

from aiohttp import web
from voltapile.gateway.api import codec
from voltapile.gateway.api.errors import json_response
from voltapile.gateway.api.generate import Delta, Generation, Outcome, usage
from voltapile.gateway.api.options import Options
from voltapile.gateway.api.progress import progress_told
from voltapile.gateway.api.services import Services
from voltapile.gateway.api.sse import EventStream, event

MARK = "\0"  # a text that no alias can hold


class Shape(Protocol):
    """How an endpoint writes its choices."""

    id_prefix: str
    object: str
    chunk_object: str

    def choice(self, outcome: Outcome) -> dict[str, Any]: ...

    def events(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices to send for `delta`, one an event; the last one carries its finish."""


class Writer(Protocol):
    def events(self, delta: Delta) -> bytes:
        """All that is sent for `delta`."""


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
    async with events:
        payloads = Payloads(head, shape, generations, options)
        if options.return_progress:
            async with progress_told(events, generations, payloads.progress):
                await feed(events, payloads, generations)
        else:
            await feed(events, payloads, generations)
        if options.include_usage:
            await events.send(head | {"choices": [], "usage": usage(generations)})
        await events.done()
    return events.response


async def feed(events: EventStream, payloads: Writer, generations: list[Generation]) -> None:
    """Every delta of the generations, until each has a finish."""
    await _Feed(events, payloads, generations).run()


class _Feed:
    """Writes the deltas of all generations as they come, until each has a finish.

    A token is written in the very call in which the engine has it. While the client does not read,
    tokens wait in their streams, which merge them.
    """

    def __init__(
        self, events: EventStream, payloads: Writer, generations: list[Generation]
    ) -> None:
        self._events, self._payloads, self._generations = events, payloads, generations
        self._open = len(generations)
        self._error: Exception | None = None
        self._is_paused = False  # the client does not read, or nothing more is to be written
        self._was_paused = asyncio.Event()

    async def run(self) -> None:
        try:
            for generation in self._generations:
                generation.listen(partial(self._take, generation))
            while self._open:
                await self._was_paused.wait()
                if self._error is not None:
                    raise self._error
                await self._events.drain()
                self._was_paused.clear()
                self._is_paused = False
                for generation in self._generations:
                    self._take(generation)
        finally:
            self._is_paused = True

    def _take(self, generation: Generation) -> None:
        """Never raises: the engine calls it."""
        if self._is_paused:
            return
        try:
            delta = generation.take()
            if delta is None:
                return
            self._open -= bool(delta.finish)
            if self._events.write(self._payloads.events(delta)) and self._open:
                return
        except Exception as error:
            self._error = error
        self._is_paused = True
        self._was_paused.set()


class Payloads:
    """The bytes of events. Most differ only in a text: they are written once, and patched."""

    def __init__(
        self,
        head: dict[str, Any],
        shape: Shape,
        generations: list[Generation],
        options: Options,
    ) -> None:
        self._head, self._shape, self._options = head, shape, options
        self._generations = generations
        self._is_plain = not (
            options.return_tokens or options.continuous_usage or options.timings_per_token
        )
        # For each choice, and for its reasoning, what stands beside the text.
        self._around: dict[tuple[int, bool], list[bytes]] = {}

    def events(self, delta: Delta) -> bytes:
        thinks = bool(delta.reasoning)
        is_special = delta.is_first or delta.finish or delta.logprobs or delta.calls
        if not self._is_plain or is_special or (thinks and delta.text):
            return b"".join(map(event, self._payloads(delta)))
        around = self._around.get((delta.index, thinks))
        if around is None:
            model = Delta(delta.index, "" if thinks else MARK, [], "", False)
            model.reasoning = MARK if thinks else ""
            [payload] = self._payloads(model)
            around = event(payload).split(codec.dumps(MARK))
            self._around[delta.index, thinks] = around
        return codec.dumps(delta.reasoning or delta.text).join(around)

    def progress(self, generation: Generation, progress: dict[str, int]) -> dict[str, Any]:
        return self._head | {"choices": [], "prompt_progress": progress}

    def _payloads(self, delta: Delta) -> list[dict[str, Any]]:
        choices = self._shape.events(delta)
        _with_tokens(choices[0], delta.tokens, self._options)
        payloads = [self._head | {"choices": [choice]} for choice in choices]
        if self._options.continuous_usage or self._options.include_usage:
            counts = usage(self._generations) if self._options.continuous_usage else None
            payloads = [payload | {"usage": counts} for payload in payloads]
        generation = self._generations[delta.index]
        if delta.finish or self._options.timings_per_token:
            payloads[-1]["timings"] = generation.timings()
        if delta.is_first and self._options.return_progress:
            payloads.insert(0, self.progress(generation, generation.progress()))
        return payloads


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
