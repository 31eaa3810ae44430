"""Plain JSON: {"name": ..., "arguments": {...}} as the whole answer, for all other models.

Where the template knows nothing of tools, they are told in the system message, and calls and
results become ordinary messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from voltapile.gateway.dialects.dialect import (
    Dialect,
    Messages,
    Tool,
    compact,
    json_calls_grammar,
)
from voltapile.gateway.dialects.json_call import JsonCall

FENCE = "```json\n"
_INTRODUCTION = (
    "You can call functions. To call one, answer with nothing but a JSON object: "
    '{"name": the function, "arguments": an object}. The functions, each with the JSON schema of '
    "its arguments:"
)


def _parser(marker: str, tools: Sequence[Tool]) -> JsonCall:
    names = {tool.name for tool in tools}
    return JsonCall("```", names) if marker == FENCE else JsonCall(names=names, begun=marker)


def _grammar(tools: Sequence[Tool], many: bool) -> str:
    return json_calls_grammar(tools, False, "arguments")


def _as_texts(messages: Messages, tools: Sequence[Tool]) -> Messages:
    prepared: Messages = []
    last: dict[str, Any] | None = None  # the message that holds results
    for message in _told(messages, tools):
        text = _as_text(message)
        is_result = text is not message and text["role"] == "user"
        if is_result and last is not None:
            last["content"] += f"\n{text['content']}"  # many templates want turns
        else:
            prepared.append(text)
            last = text if is_result else None
    return prepared


def _told(messages: Messages, tools: Sequence[Tool]) -> Messages:
    if not tools:
        return messages
    lines = [compact({"name": t.name, "description": t.description, "parameters": t.schema})
             for t in tools]  # fmt: skip
    text = "\n".join([_INTRODUCTION, *lines])
    first = messages[0]
    if first.get("role") == "system" and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Calls as the model would have written them, results as the user's word."""
    if message.get("role") == "tool":
        content = message.get("content")
        if isinstance(content, list):
            content = "\n".join(str(part.get("text", "")) for part in content)
        return {"role": "user", "content": f"Result of the function: {content}"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]] if isinstance(message.get("content"), str) else []
    texts += [compact({key: call["function"].get(key) for key in ("name", "arguments")})
              for call in calls]  # fmt: skip
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, texts))}


PLAIN = Dialect(name="plain", firsts=(FENCE, "{"), parser=_parser, grammar=_grammar)
UNTAUGHT = replace(PLAIN, prepared=_as_texts)  # for templates that know nothing of tools
UNTOLD = replace(PLAIN, prepared=_told)  # for those that know of calls and do not show tools
