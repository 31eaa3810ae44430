"""POST /v1/messages and /v1/messages/count_tokens: what Anthropic's clients ask.

It writes Anthropic's bodies and events; how a body is read is messages_schema.py's. A first event
leaves at once, so what of the prompt was cached is told by the last ones.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import uuid
from typing import Any

from aiohttp import web
from voltapile.gateway.api import codec
from voltapile.gateway.api.answer import feed
from voltapile.gateway.api.bounds import bounds_of
from voltapile.gateway.api.errors import ApiError, json_response
from voltapile.gateway.api.generate import Delta, Generation, Outcome, started
from voltapile.gateway.api.messages_schema import messages_request
from voltapile.gateway.api.prompt import chat_ids, conversation
from voltapile.gateway.api.schema import ChatRequest
from voltapile.gateway.api.services import SERVICES, Services, client_of, off_loop, read_body
from voltapile.gateway.api.sse import EventStream
from voltapile.gateway.dialects.dialect import Fragment

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


async def messages(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    chat = await _read(request)
    asked = await conversation(services, chat)
    client, options = client_of(request), chat.options
    bounds = await bounds_of(services, options, asked.reading)
    [generation] = started(
        services, [asked.ids], options, client, reading=asked.reading, bounds=bounds
    )
    try:
        if options.stream:
            return await _streamed(request, services, generation)
        outcome = await generation.whole()
        body = _message(services, generation) | {"content": _content(outcome)}
        body |= _stop(generation) | {"usage": _usage(generation)}
        return json_response(body)
    finally:
        generation.close()


async def count_tokens(request: web.Request) -> web.Response:
    prompt = await chat_ids(request.app[SERVICES], await _read(request))
    return json_response({"input_tokens": len(prompt)})


async def _read(request: web.Request) -> ChatRequest:
    body = await read_body(request)
    services = request.app[SERVICES]
    known = services.tokenizer.vocab_size, services.defaults
    return await off_loop(len(body), messages_request, body, *known)


async def _streamed(
    request: web.Request, services: Services, generation: Generation
) -> web.StreamResponse:
    events = EventStream(
        request,
        keepalive_seconds=services.keepalive_seconds,
        write_seconds=services.write_seconds,
        comment=PING,
        failure=_failure,
    )
    async with events:
        message = _message(services, generation) | {"usage": _usage(generation)}
        events.write(_event("message_start", message=message))
        await feed(events, _Blocks(generation), [generation])
        await events.drain()
    return events.response


class _Blocks:
    """The events of one message, block after block."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._index = -1
        self._kind = ""  # of the open block
        self._thought = ""  # of the open block, if it is one of thinking

    def events(self, delta: Delta) -> bytes:
        # What goes on with an open call stands before whatever else has come with it.
        calls = delta.calls
        begun = next((i for i, each in enumerate(calls) if each.name), len(calls))
        data = self._calls(calls[:begun])
        if delta.reasoning:
            data += self._open("thinking", _thinking(""))
            data += self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
            self._thought += delta.reasoning
        if delta.text and (self._kind != "tool_use" or not delta.text.isspace()):
            data += self._open("text", {"type": "text", "text": ""})
            data += self._delta({"type": "text_delta", "text": delta.text})
        data += self._calls(calls[begun:])
        if delta.finish:
            generation = self._generation
            data += self._close()
            data += _event("message_delta", delta=_stop(generation), usage=_usage(generation))
            data += _event("message_stop")
        return data

    def _calls(self, fragments: list[Fragment]) -> bytes:
        data = b""
        for fragment in fragments:
            if fragment.name:
                data += self._close() + self._open("tool_use", _tool_use(fragment.name))
            if fragment.arguments:
                part = {"type": "input_json_delta", "partial_json": fragment.arguments}
                data += self._delta(part)
        return data

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        """Nothing where such a block is open."""
        if self._kind == kind:
            return b""
        data = self._close()
        self._index += 1
        self._kind = kind
        return data + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        data = b""
        if self._kind == "thinking":
            data = self._delta({"type": "signature_delta", "signature": _signature(self._thought)})
        self._kind = self._thought = ""
        return data + _event("content_block_stop", index=self._index)


def _content(outcome: Outcome) -> list[dict[str, Any]]:
    """In the order in which a stream has them."""
    content: list[dict[str, Any]] = []
    if outcome.reasoning:
        content.append(_thinking(outcome.reasoning, _signature(outcome.reasoning)))
    if outcome.text:
        content.append({"type": "text", "text": outcome.text})
    arguments: list[str] = []
    for fragment in outcome.calls:
        if fragment.name:
            content.append(_tool_use(fragment.name))
            arguments.append("")
        arguments[-1] += fragment.arguments
    calls = (block for block in content if block["type"] == "tool_use")
    for block, text in zip(calls, arguments, strict=True):
        block["input"] = _object(text)
    return content


def _object(text: str) -> Any:
    """What is no JSON, as an answer was cut, is given as text under a key of its own."""
    try:
        return codec.loads(text.encode()) if text else {}
    except codec.JsonError:
        return {"raw_arguments": text}


def _thinking(text: str, signature: str = "") -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _signature(thought: str) -> str:
    """Clients keep only thoughts that have one. It is a digest, which nobody checks."""
    return base64.b64encode(hashlib.sha256(thought.encode()).digest()).decode()


def _tool_use(name: str) -> dict[str, Any]:
    call = f"toolu_{secrets.token_hex(12)}"
    return {"type": "tool_use", "id": call, "name": name, "input": {}}


def _message(services: Services, generation: Generation) -> dict[str, Any]:
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": services.plan.alias,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _stop(generation: Generation) -> dict[str, Any]:
    if generation.finish == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if generation.finish != "stop":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if met := generation.stop_string:
        return {"stop_reason": "stop_sequence", "stop_sequence": met}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(generation: Generation) -> dict[str, Any]:
    """Anthropic's input_tokens are those that were not cached."""
    cached = generation.cached_tokens
    return {
        "input_tokens": generation.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generation.completion_tokens,
    }


def _event(name: str, **fields: Any) -> bytes:
    payload = codec.dumps({"type": name} | fields)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), payload)


def _failure(error: ApiError) -> bytes:
    return b"event: error\ndata: %b\n\n" % codec.dumps(error.anthropic_body())
