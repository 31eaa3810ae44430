"""POST /completion: llama-server's own route, for its clients and scripts.

Streams end without [DONE], as there; the last event is the one with "stop": true. It does not know
how a body is read (native_schema.py).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from aiohttp import web
from voltapile.gateway.api.answer import feed
from voltapile.gateway.api.bounds import bounds_of
from voltapile.gateway.api.echo import TokenLogprob
from voltapile.gateway.api.errors import json_response
from voltapile.gateway.api.generate import Delta, Generation, Outcome, started
from voltapile.gateway.api.native_schema import NativeRequest, Prompt, native_request
from voltapile.gateway.api.progress import progress_told
from voltapile.gateway.api.prompt import checked, encoded
from voltapile.gateway.api.services import SERVICES, Services, client_of, off_loop, read_body
from voltapile.gateway.api.settings import generation_settings
from voltapile.gateway.api.sse import EventStream, event
from voltapile.gateway.tokenizer import Tokenizer


async def completion(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    body = await read_body(request)
    known = services.tokenizer.vocab_size, services.defaults
    asked = await off_loop(len(body), native_request, body, *known)
    return await native_answer(request, services, asked)


async def native_answer(
    request: web.Request, services: Services, asked: NativeRequest
) -> web.StreamResponse:
    known = services.tokenizer, services.plan.context
    prompts = await off_loop(asked.body_bytes, _all_encoded, *known, asked.prompts)
    bounds = await bounds_of(services, asked.options)
    generations = started(services, prompts, asked.options, client_of(request), bounds=bounds)
    shape = _Shape(services, asked, prompts, generations)
    try:
        if asked.options.stream:
            return await _streamed(request, services, shape, generations)
        outcomes = await asyncio.gather(*(generation.whole() for generation in generations))
        answers = [shape.whole(outcome) for outcome in outcomes]
        return json_response(answers if asked.is_list or len(answers) > 1 else answers[0])
    finally:
        for generation in generations:
            generation.close()


async def _streamed(
    request: web.Request, services: Services, shape: _Shape, generations: list[Generation]
) -> web.StreamResponse:
    events = EventStream(
        request,
        keepalive_seconds=services.keepalive_seconds,
        write_seconds=services.write_seconds,
    )
    async with events:
        if shape.asked.options.return_progress:
            async with progress_told(events, generations, shape.progress):
                await feed(events, shape, generations)
        else:
            await feed(events, shape, generations)
        await events.drain()
    return events.response


def _all_encoded(tokenizer: Tokenizer, context: int, prompts: list[Prompt]) -> list[list[int]]:
    return [checked(_encoded(tokenizer, context, each), context, "prompt") for each in prompts]


def _encoded(tokenizer: Tokenizer, context: int, prompt: Prompt) -> list[int]:
    """Texts and ids in their order; the beginning gets what the vocabulary adds to one."""
    ids: list[int] = []
    for i, part in enumerate(prompt):
        if isinstance(part, int):
            ids.append(part)
        else:
            encode = partial(tokenizer.encode, add_special=i == 0)
            ids += encoded(encode, part, context, "prompt")
    return ids


class _Shape:
    """How answers look; it remembers of each stream whether a line has ended."""

    def __init__(
        self,
        services: Services,
        asked: NativeRequest,
        prompts: list[list[int]],
        generations: list[Generation],
    ) -> None:
        self.asked = asked
        self._services, self._prompts, self._generations = services, prompts, generations
        self._has_new_line = [False] * len(generations)

    def whole(self, outcome: Outcome) -> dict[str, Any]:
        tokens = outcome.tokens if self.asked.options.return_tokens else []
        body = self._end(outcome.index, "\n" in outcome.text, outcome.finish)
        body |= {"content": outcome.text, "tokens": tokens}
        if outcome.logprobs is not None:
            body["completion_probabilities"] = [_probabilities(e) for e in outcome.logprobs]
        return _chosen(body, self.asked.response_fields)

    def events(self, delta: Delta) -> bytes:
        options, generation = self.asked.options, self._generations[delta.index]
        self._has_new_line[delta.index] |= "\n" in delta.text
        data = b""
        if delta.is_first and options.return_progress:
            data += event(self.progress(generation, generation.progress()))
        is_told = delta.text or delta.logprobs or (delta.tokens and options.return_tokens)
        if is_told or not delta.finish:
            body = self._chunk(generation) | {"content": delta.text, "tokens": delta.tokens}
            if delta.logprobs:
                body["completion_probabilities"] = [_probabilities(e) for e in delta.logprobs]
            if options.timings_per_token:
                body["timings"] = generation.timings()
            data += event(body)
        if delta.finish:
            has_new_line = self._has_new_line[delta.index]
            body = self._end(delta.index, has_new_line, delta.finish)
            data += event(_chosen(body, self.asked.response_fields))
        return data

    def progress(self, generation: Generation, progress: dict[str, int]) -> dict[str, Any]:
        return self._chunk(generation) | {"prompt_progress": progress}

    def _chunk(self, generation: Generation) -> dict[str, Any]:
        return {
            "index": generation.index,
            "content": "",
            "tokens": [],
            "stop": False,
            "id_slot": generation.slot,
            "tokens_predicted": generation.completion_tokens,
            "tokens_evaluated": generation.prompt_tokens,
        }

    def _end(self, index: int, has_new_line: bool, finish: str) -> dict[str, Any]:
        services, generation = self._services, self._generations[index]
        prompt = self._prompts[index // self.asked.options.n]
        return self._chunk(generation) | {
            "stop": True,
            "model": services.plan.alias,
            "generation_settings": generation_settings(
                generation.sampling, self.asked.options, generation.prompt_tokens
            ),
            "prompt": services.tokenizer.decode(prompt, special=True),
            "has_new_line": has_new_line,
            "truncated": False,
            "stop_type": _stop_type(generation, finish),
            "stopping_word": generation.stop_string,
            "tokens_cached": generation.prompt_tokens + max(0, generation.completion_tokens - 1),
            "timings": generation.timings(),
        }


def _stop_type(generation: Generation, finish: str) -> str:
    if finish != "stop":
        return "limit"
    return "word" if generation.stop_string else "eos"


def _probabilities(entry: TokenLogprob) -> dict[str, Any]:
    tops = zip(entry.top_ids, entry.top, strict=True)
    return _token(entry.id, entry.token, entry.logprob) | {
        "top_logprobs": [_token(i, token, logprob) for i, (token, logprob) in tops]
    }


def _token(token_id: int, token: bytes, logprob: float | None) -> dict[str, Any]:
    text = token.decode("utf-8", "replace")
    return {"id": token_id, "token": text, "bytes": list(token), "logprob": logprob}


def _chosen(body: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Only what response_fields names; a path with slashes comes under its last part."""
    if not names:
        return body
    chosen: dict[str, Any] = {}
    for name in names:
        value: Any = body
        *_, last = parts = name.split("/")
        for part in parts:
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            chosen[last] = value
    return chosen
