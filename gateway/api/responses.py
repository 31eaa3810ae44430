"""POST /v1/responses: OpenAI's newer form of a chat, without a memory: nothing is stored.

It writes OpenAI's items and events; how a body is read is responses_schema.py's.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from aiohttp import web
from voltapile.gateway.api import codec
from voltapile.gateway.api.answer import feed
from voltapile.gateway.api.bounds import bounds_of
from voltapile.gateway.api.errors import ApiError, json_response
from voltapile.gateway.api.generate import Delta, Generation, Outcome, started, usage
from voltapile.gateway.api.prompt import conversation
from voltapile.gateway.api.responses_fields import in_its_words, in_these_words
from voltapile.gateway.api.responses_schema import ResponsesRequest, responses_request
from voltapile.gateway.api.services import SERVICES, Services, client_of, off_loop, read_body
from voltapile.gateway.api.sse import EventStream
from voltapile.gateway.dialects.dialect import Fragment

# What an answer repeats of its request, and what it says where nothing was asked.
REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "user": None,
}


async def responses(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    body = await read_body(request)
    known = services.tokenizer.vocab_size, services.defaults
    wanted = await off_loop(len(body), responses_request, body, *known)
    chat = wanted.chat
    with in_these_words():
        asked = await conversation(services, chat)
        bounds = await bounds_of(services, chat.options, asked.reading)
        [generation] = started(
            services, [asked.ids], chat.options, client_of(request), reading=asked.reading,
            bounds=bounds,
        )  # fmt: skip
    answer = _Answer(services, generation, wanted)
    try:
        if chat.options.stream:
            return await _streamed(request, services, answer)
        with in_these_words():
            answer.take(await generation.whole())
        return json_response(answer.response())
    finally:
        generation.close()


async def _streamed(
    request: web.Request, services: Services, answer: _Answer
) -> web.StreamResponse:
    events = EventStream(
        request,
        keepalive_seconds=services.keepalive_seconds,
        write_seconds=services.write_seconds,
        failure=answer.failure,
    )
    async with events:
        events.write(answer.begin())
        await feed(events, answer, [answer.generation])
        await events.drain()
    return events.response


class _Answer:
    """The items of one answer as they come, and the events that tell of them."""

    def __init__(
        self, services: Services, generation: Generation, wanted: ResponsesRequest
    ) -> None:
        self.generation = generation
        self._spaces = wanted.spaces
        fields, options = wanted.fields, wanted.chat.options
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # the last item
        self._events = 0
        given = {key: fields.values.get(key) for key in REPEATED}
        self._head = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": services.plan.alias,
            "previous_response_id": None,
            "store": False,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "truncation": "disabled",
        } | {key: given[key] if given[key] is not None else REPEATED[key] for key in REPEATED}

    def response(self, status: str = "", error: dict[str, Any] | None = None) -> dict[str, Any]:
        """As it stands now."""
        is_cut = self.generation.finish == "length"
        is_over = status in ("", "failed")
        return self._head | {
            "status": status or ("incomplete" if is_cut else "completed"),
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items,
            "usage": _usage(self.generation) if is_over else None,
        }

    def begin(self) -> bytes:
        names = ("created", "in_progress")
        return b"".join(
            self._event(f"response.{name}", response=self.response("in_progress")) for name in names
        )

    def failure(self, error: ApiError) -> bytes:
        error = in_its_words(error)
        told = {"code": error.code or "server_error", "message": error.message}
        data = self._event("response.failed", response=self.response("failed", told))
        return data + self._event("error", param=error.param, **told)

    def take(self, outcome: Outcome) -> None:
        """All of it at once."""
        whole = Delta(0, outcome.text, [], outcome.finish, True)
        whole.reasoning, whole.calls = outcome.reasoning, outcome.calls
        self.events(whole)

    def events(self, delta: Delta) -> bytes:
        # What goes on with an open call stands before whatever else has come with it.
        calls = delta.calls
        begun = next((i for i, each in enumerate(calls) if each.name), len(calls))
        data = self._calls(calls[:begun])
        if delta.reasoning:
            data += self._said("reasoning", "reasoning_text", delta.reasoning)
        is_between = bool(self._items) and self._items[-1]["type"] == "function_call"
        if delta.text and not (is_between and delta.text.isspace()):
            data += self._said("message", "output_text", delta.text)
        data += self._calls(calls[begun:])
        if delta.finish:
            data += self._close(is_cut=self.generation.finish == "length")
            response = self.response()
            data += self._event(f"response.{response['status']}", response=response)
        return data

    def _said(self, kind: str, part_kind: str, text: str) -> bytes:
        data = b""
        if not self._is_open or self._items[-1]["type"] != kind:
            data = self._close() + self._open(_item(kind))
            part: dict[str, Any] = {"type": part_kind, "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            data += self._event("response.content_part.added", **self._place(), part=part)
            self._items[-1]["content"] = [part]
        part = self._items[-1]["content"][0]
        data += self._event(f"response.{part_kind}.delta", **self._place(), delta=text,
                            **_logprobs(part_kind))  # fmt: skip
        part["text"] += text
        return data

    def _calls(self, fragments: list[Fragment]) -> bytes:
        data = b""
        for fragment in fragments:
            if fragment.name:
                data += self._close() + self._open(self._call(fragment.name))
            if fragment.arguments:
                self._items[-1]["arguments"] += fragment.arguments
                name = "response.function_call_arguments.delta"
                data += self._event(name, **self._place(False), delta=fragment.arguments)
        return data

    def _call(self, name: str) -> dict[str, Any]:
        space, inner = self._spaces.get(name, ("", name))
        return _item("function_call", inner) | ({"namespace": space} if space else {})

    def _open(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        self._is_open = True
        place = {"output_index": len(self._items) - 1}
        return self._event("response.output_item.added", **place, item=item)

    def _close(self, is_cut: bool = False) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._items[-1]
        item["status"] = "incomplete" if is_cut else "completed"
        if item["type"] == "function_call":
            given = {key: item[key] for key in ("name", "arguments")}
            name = "response.function_call_arguments.done"
            data = self._event(name, **self._place(False), **given)
        else:
            part = item["content"][0]
            data = self._event(f"response.{part['type']}.done", **self._place(), text=part["text"],
                               **_logprobs(part["type"]))  # fmt: skip
            data += self._event("response.content_part.done", **self._place(), part=part)
        place = {"output_index": len(self._items) - 1}
        return data + self._event("response.output_item.done", **place, item=item)

    def _place(self, has_content: bool = True) -> dict[str, Any]:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place | {"content_index": 0} if has_content else place

    def _event(self, name: str, /, **fields: Any) -> bytes:
        payload = codec.dumps({"type": name, "sequence_number": self._events} | fields)
        self._events += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), payload)


def _item(kind: str, name: str = "") -> dict[str, Any]:
    item: dict[str, Any] = {"type": kind, "status": "in_progress"}
    if kind == "message":
        return item | {"id": f"msg_{secrets.token_hex(12)}", "role": "assistant", "content": []}
    if kind == "reasoning":
        return item | {"id": f"rs_{secrets.token_hex(12)}", "summary": [], "content": []}
    call = {"call_id": f"call_{secrets.token_hex(12)}", "name": name, "arguments": ""}
    return item | {"id": f"fc_{secrets.token_hex(12)}"} | call


def _logprobs(part_kind: str) -> dict[str, Any]:
    return {"logprobs": []} if part_kind == "output_text" else {}


def _usage(generation: Generation) -> dict[str, Any]:
    counts = usage([generation])
    thought = counts.get("completion_tokens_details", {"reasoning_tokens": 0})
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": thought,
        "total_tokens": counts["total_tokens"],
    }
