"""POST /v1/completions: the model goes on from one or several texts or lists of token ids."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from voltapile.gateway.api.answer import answer
from voltapile.gateway.api.generate import Delta, Generation, Outcome
from voltapile.gateway.api.prompt import completion_prompts
from voltapile.gateway.api.schema import CompletionRequest, completion_request
from voltapile.gateway.api.services import SERVICES, Services, off_loop, read_body


class CompletionShape:
    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, outcome: Outcome) -> dict[str, Any]:
        return {"index": outcome.index, "text": outcome.text, "finish_reason": outcome.finish}

    def events(self, delta: Delta) -> list[dict[str, Any]]:
        finish = delta.finish or None
        return [{"index": delta.index, "text": delta.text, "finish_reason": finish}]


async def completions(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    body = await read_body(request)
    asked = await off_loop(len(body), completion_request, body, services.tokenizer.vocab_size)
    prompts = await completion_prompts(services, asked)
    generations = _start(services, asked, prompts)
    return await answer(request, services, CompletionShape(), generations, asked.options)


def _start(
    services: Services, asked: CompletionRequest, prompts: list[list[int]]
) -> list[Generation]:
    """One generation a prompt; none at all if the engine does not take every one."""
    generations: list[Generation] = []
    try:
        for i, prompt in enumerate(prompts):
            prefix = _echo(services, asked.prompts[i]) if asked.echo else ""
            generations.append(Generation(services, prompt, asked.options, i, prefix))
    except Exception:
        for generation in generations:
            generation.close()
        raise
    return generations


def _echo(services: Services, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else services.tokenizer.decode(prompt, special=True)
