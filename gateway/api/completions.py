"""POST /v1/completions: the model goes on from one or several texts or lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web
from voltapile.gateway.api.answer import answer
from voltapile.gateway.api.bounds import bounds_of
from voltapile.gateway.api.echo import Echo
from voltapile.gateway.api.generate import Delta, Outcome, started
from voltapile.gateway.api.infill import filler_of
from voltapile.gateway.api.logprobs import NO_LOGPROBS, completion_logprobs
from voltapile.gateway.api.prompt import completion_prompts, encoded
from voltapile.gateway.api.schema import CompletionRequest, completion_request
from voltapile.gateway.api.services import SERVICES, Services, client_of, off_loop, read_body


class CompletionShape:
    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, outcome: Outcome) -> dict[str, Any]:
        told = NO_LOGPROBS
        if outcome.logprobs is not None:
            told = completion_logprobs(outcome.logprobs)
        return _choice(outcome.index, outcome.text, outcome.finish) | told

    def events(self, delta: Delta) -> list[dict[str, Any]]:
        choice = _choice(delta.index, delta.text, delta.finish or None)
        return [choice | completion_logprobs(delta.logprobs) if delta.logprobs else choice]


def _choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": finish}


async def completions(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    body = await read_body(request)
    known = services.tokenizer.vocab_size, services.defaults
    asked = await off_loop(len(body), completion_request, body, *known)
    if asked.suffix:
        asked = await off_loop(len(body), _with_gaps, services, asked)
    prompts = await completion_prompts(services, asked)
    echoes = _echoes(services, asked.prompts, prompts) if asked.echo else None
    bounds = await bounds_of(services, asked.options)
    client = client_of(request)
    generations = started(services, prompts, asked.options, client, echoes, bounds=bounds)
    return await answer(request, services, CompletionShape(), generations, asked.options)


def _with_gaps(services: Services, asked: CompletionRequest) -> CompletionRequest:
    """The prompts as those of a model that fills in what stands before the suffix."""
    filler = filler_of(services, "suffix")
    context = services.plan.context
    behind = encoded(filler.ids, asked.suffix, context, "suffix")
    befores = [encoded(filler.ids, str(each), context, "prompt") for each in asked.prompts]
    prompts = [filler.prompt(before, behind) for before in befores]
    options = replace(asked.options, stop_ids=[*asked.options.stop_ids, *filler.ends])
    return replace(asked, prompts=prompts, options=options)


def _echoes(
    services: Services, given: Sequence[str | list[int]], prompts: list[list[int]]
) -> list[Echo]:
    return [Echo(services.tokenizer, one, ids) for one, ids in zip(given, prompts, strict=True)]
