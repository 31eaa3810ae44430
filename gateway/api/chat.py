"""POST /v1/chat/completions: a conversation through the model's chat template."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from voltapile.gateway.api.answer import answer
from voltapile.gateway.api.generate import Delta, Outcome, started
from voltapile.gateway.api.logprobs import chat_logprobs
from voltapile.gateway.api.prompt import chat_prompt
from voltapile.gateway.api.schema import chat_request
from voltapile.gateway.api.services import SERVICES, client_of, off_loop, read_body


class ChatShape:
    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, outcome: Outcome) -> dict[str, Any]:
        message = {"role": "assistant", "content": outcome.text}
        choice = {"index": outcome.index, "message": message, "finish_reason": outcome.finish}
        return choice if outcome.logprobs is None else choice | chat_logprobs(outcome.logprobs)

    def events(self, delta: Delta) -> list[dict[str, Any]]:
        """The role comes with the first token, so that the first event is the first token's."""
        contents: list[dict[str, str]] = []
        if delta.is_first:
            contents.append({"role": "assistant", "content": delta.text})
        elif delta.text or delta.logprobs or not delta.finish:
            contents.append({"content": delta.text})
        events = [_event(delta.index, content, None) for content in contents]
        if delta.logprobs:
            events[0] |= chat_logprobs(delta.logprobs)
        return [*events, _event(delta.index, {}, delta.finish)] if delta.finish else events


def _event(index: int, delta: dict[str, str], finish: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish}


async def chat_completions(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    body = await read_body(request)
    chat = await off_loop(len(body), chat_request, body, services.tokenizer.vocab_size)
    prompt = await chat_prompt(services, chat)
    generations = started(services, [prompt], chat.options, client_of(request))
    return await answer(request, services, ChatShape(), generations, chat.options)
