"""POST /v1/chat/completions: a conversation through the model's chat template."""

from __future__ import annotations

import secrets
from collections import Counter
from typing import Any

from aiohttp import web
from voltapile.gateway.api.answer import answer
from voltapile.gateway.api.bounds import bounds_of
from voltapile.gateway.api.generate import Delta, Outcome, started
from voltapile.gateway.api.logprobs import NO_LOGPROBS, chat_logprobs
from voltapile.gateway.api.prompt import conversation
from voltapile.gateway.api.schema import chat_request
from voltapile.gateway.api.services import SERVICES, client_of, off_loop, read_body
from voltapile.gateway.dialects.dialect import Fragment


class ChatShape:
    """For the choices of one request: it counts their tool calls."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self) -> None:
        self._calls: Counter[int] = Counter()  # by choice

    def choice(self, outcome: Outcome) -> dict[str, Any]:
        calls = _whole_calls(outcome.calls)
        message: dict[str, Any] = {"role": "assistant", "content": outcome.text}
        if outcome.reasoning:
            message["reasoning_content"] = outcome.reasoning
        if calls:
            message |= {"content": outcome.text or None, "tool_calls": calls}
        told = chat_logprobs(outcome.logprobs) if outcome.logprobs is not None else NO_LOGPROBS
        head = {"index": outcome.index, "message": message, "finish_reason": outcome.finish}
        return head | told

    def events(self, delta: Delta) -> list[dict[str, Any]]:
        """The role comes with the first token, so that the first event is the first token's."""
        parts: list[dict[str, Any]] = []
        if delta.reasoning:
            parts.append({"reasoning_content": delta.reasoning})
        if delta.text:
            parts.append({"content": delta.text})
        parts += [{"tool_calls": [self._call(delta.index, each)]} for each in delta.calls]
        if not parts and (delta.is_first or delta.logprobs or not delta.finish):
            parts.append({"content": ""})
        if delta.is_first:
            parts[0] = {"role": "assistant", "content": None} | parts[0]
        events = [_event(delta.index, part, None) for part in parts]
        if delta.logprobs:
            events[0] |= chat_logprobs(delta.logprobs)
        return [*events, _event(delta.index, {}, delta.finish)] if delta.finish else events

    def _call(self, choice: int, fragment: Fragment) -> dict[str, Any]:
        self._calls[choice] += bool(fragment.name)
        index = self._calls[choice] - 1
        if not fragment.name:
            return {"index": index, "function": {"arguments": fragment.arguments}}
        return {"index": index} | _call(fragment.name, fragment.arguments)


def _whole_calls(fragments: list[Fragment]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for fragment in fragments:
        if fragment.name:
            calls.append(_call(fragment.name, fragment.arguments))
        else:
            calls[-1]["function"]["arguments"] += fragment.arguments
    return calls


def _call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _event(index: int, delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish}


async def chat_completions(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    body = await read_body(request)
    known = services.tokenizer.vocab_size, services.defaults
    chat = await off_loop(len(body), chat_request, body, *known)
    asked = await conversation(services, chat)
    reading, client = asked.reading, client_of(request)
    bounds = await bounds_of(services, chat.options, reading)
    generations = started(
        services, [asked.ids], chat.options, client, reading=reading, bounds=bounds
    )
    return await answer(request, services, ChatShape(), generations, chat.options)
