"""What OpenAI's clients send to /v1/responses, as the ChatRequest that a chat would have been.

Items become the messages that chat templates know. Nothing is stored here, so whoever asks sends
the whole conversation each time. It does not know how the answer looks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from voltapile.gateway.api.errors import ApiError, bad_request
from voltapile.gateway.api.fields import Fields, kind
from voltapile.gateway.api.options import NO_DEFAULTS, Defaults
from voltapile.gateway.api.responses_fields import (
    check_single,
    in_these_words,
    not_a_function,
    of_the_chat,
)
from voltapile.gateway.api.schema import ChatRequest, chat_of

TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """fields: as they came, since an answer repeats some. spaces: the namespace and the name of
    functions that the chat knows by both in one."""

    chat: ChatRequest
    fields: Fields
    spaces: dict[str, tuple[str, str]]


def responses_request(
    body: bytes, vocab_size: int, defaults: Defaults = NO_DEFAULTS
) -> ResponsesRequest:
    fields = Fields.parse(body)
    chat = of_the_chat(fields)
    chat |= _limit(fields) | _form(fields) | _effort(fields)
    chat["messages"] = _instructions(fields) + _messages(fields.values.get("input"))
    spaces: dict[str, tuple[str, str]] = {}
    places: list[str] = []
    if fields.values.get("tools") is not None:
        found = list(_tools(fields.list("tools"), "tools", spaces))
        chat["tools"], places = [tool for tool, _ in found], [place for _, place in found]
    chat["tool_choice"] = _choice(fields.values.get("tool_choice"))
    with in_these_words(places):
        asked = chat_of(Fields(chat).over(defaults), vocab_size, len(body))
    check_single(asked.options)
    return ResponsesRequest(asked, fields, spaces)


def _limit(fields: Fields) -> dict[str, Any]:
    name = "max_output_tokens"
    limit = fields.integer(name)
    if limit is not None and limit < 1:
        raise bad_request(f"'{name}' must be at least 1, not {limit}", name, "out_of_range")
    return {} if limit is None else {"max_completion_tokens": limit}


def _form(fields: Fields) -> dict[str, Any]:
    form = fields.object("text").object("format").values
    if form.get("type") != "json_schema":
        if form.get("type") not in (None, "text", "json_object"):
            message = "'text.format.type' must be text, json_object or json_schema"
            raise bad_request(message, "text.format.type")
        return {"response_format": form} if form else {}
    if not isinstance(form.get("schema"), dict):
        what = f"'text.format.schema' must be an object, not {kind(form.get('schema'))}"
        raise bad_request(what, "text.format.schema", "invalid_type")
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": form["schema"]}}}


def _effort(fields: Fields) -> dict[str, Any]:
    effort = fields.object("reasoning").text("effort")
    return {} if effort is None else {"reasoning_effort": effort}


def _tools(
    given: list[Any], param: str, spaces: dict[str, tuple[str, str]]
) -> Iterator[tuple[dict[str, Any], str]]:
    """Each with its place. A namespace holds tools of its own, whose names others may have, too."""
    for i, tool in enumerate(given):
        where = f"{param}[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "namespace":
            yield _tool(tool, where), where
            continue
        fields = Fields(tool, f"{where}.")
        space = _name(fields, "name", where)
        for each, place in _tools(fields.list("tools"), f"{where}.tools", {}):
            name = each["function"].get("name")
            if isinstance(name, str):  # or the chat refuses it
                each["function"]["name"] = joined = _joined(space, name)
                spaces[joined] = space, name
            yield each, place


def _joined(space: Any, name: Any) -> Any:
    return f"{space}__{name}" if isinstance(space, str) and isinstance(name, str) else name


def _tool(tool: Any, param: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise not_a_function(tool, param)
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in names if key in tool}}


def _choice(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.get("type") == "allowed_tools":
        tools = value.get("tools")
        named = [_named(tool) for tool in tools] if isinstance(tools, list) else tools
        allowed = {"mode": value.get("mode"), "tools": named}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return _named(value)


def _named(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.get("type") != "function":
        raise not_a_function(value, "tool_choice")
    name = _joined(value.get("namespace"), value.get("name"))
    return {"type": "function", "function": {"name": name}}


def _instructions(fields: Fields) -> list[dict[str, Any]]:
    text = fields.text("instructions")
    return [{"role": "system", "content": text}] if text else []


def _messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if value is None:
        raise bad_request("'input' is missing", "input", "missing_required_parameter")
    if not isinstance(value, list):
        message = f"'input' must be a string or a list, not {kind(value)}"
        raise bad_request(message, "input", "invalid_type")
    if not value:
        raise bad_request("'input' must not be empty", "input")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(value):
        _add(messages, item, f"input[{i}]")
    return messages


def _add(messages: list[dict[str, Any]], item: Any, param: str) -> None:
    if not isinstance(item, dict):
        raise bad_request(f"'{param}' must be an object, not {kind(item)}", param, "invalid_type")
    fields = Fields(item, f"{param}.")
    match fields.text("type") or "message":
        case "message":
            role = _name(fields, "role", param)
            content = _text(item.get("content"), f"{param}.content")
            if role == "assistant":
                _assistants(messages)["content"] += content
            else:
                messages.append({"role": role, "content": content})
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            message = _assistants(messages)
            thought = _text(parts, f"{param}.content")
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        case "function_call":
            call = {
                "id": _given(fields, "call_id", param),
                "type": "function",
                "function": {
                    "name": _joined(fields.text("namespace"), _name(fields, "name", param)),
                    "arguments": fields.text("arguments") or "",
                },
            }
            _assistants(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            call_id = _given(fields, "call_id", param)
            output = _text(item.get("output"), f"{param}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        case other:
            raise _unknown(other, param)


def _assistants(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """One message holds all that the model has said in a row."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(value: Any, param: str) -> str:
    """A string, or text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        what = f"'{param}' must be a string or a list of parts, not {kind(value)}"
        raise bad_request(what, param, "invalid_type")
    return "\n".join(_part(part, f"{param}[{i}]") for i, part in enumerate(value))


def _part(part: Any, param: str) -> str:
    name = part.get("type") if isinstance(part, dict) else None
    if not isinstance(name, str):
        raise bad_request(f"'{param}' must be an object with a type", param, "invalid_type")
    if name not in TEXTS:
        raise _unknown(name, param)
    return _given(Fields(part, f"{param}."), "refusal" if name == "refusal" else "text", param)


def _given(fields: Fields, name: str, param: str) -> str:
    value = fields.text(name)
    if value is None:
        where = f"{param}.{name}"
        raise bad_request(f"'{where}' is missing", where, "missing_required_parameter")
    return value


def _name(fields: Fields, name: str, param: str) -> str:
    """Which an empty text is not."""
    return _given(fields if fields.values.get(name) != "" else Fields({}), name, param)


def _unknown(name: str, param: str) -> ApiError:
    what = f"'{param}' is of type '{name:.40}', which is not supported here"
    return bad_request(what, param, "unsupported_content")
