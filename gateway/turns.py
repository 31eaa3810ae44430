"""Turns: messages in an order of roles that a chat template takes.

Agents send system messages in the middle of a conversation, and clients several messages of one
role in a row; many templates refuse either. It knows messages only, and no template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_THOUGHTS = "reasoning_content"


def in_turns(
    messages: Sequence[Message], takes_late_system: bool, takes_neighbours: bool
) -> list[Message]:
    """takes_late_system: a system message may come later than first. takes_neighbours: two of a
    user's may follow each other."""
    turns: list[Message] = []
    for message in messages:
        last = turns[-1] if turns else {}
        if message["role"] == "system" and turns and not takes_late_system:
            if last["role"] == "system":
                turns[-1] = _joined(last, message)
                continue
            message = {**message, "role": "user"}
        if not takes_neighbours and _are_one(last, message):
            turns[-1] = _joined(last, message)
        else:
            turns.append(message)
    return turns


def _are_one(last: Mapping[str, Any], message: Message) -> bool:
    """Templates that ask for turns look past results, so a user's words go with one."""
    roles = last.get("role"), message["role"]
    has_calls = last.get("tool_calls") or message.get("tool_calls")
    return not has_calls and roles in (
        ("user", "user"),
        ("tool", "user"),
        ("assistant", "assistant"),
    )


def _joined(first: Message, second: Message) -> Message:
    """What the second has and the first has not stays, too."""
    one, two = first.get("content"), second.get("content")
    if isinstance(one, list) or isinstance(two, list):
        content: Any = _parts(one) + _parts(two)
    else:
        content = _texts(one, two)
    joined = {**second, **first, "content": content}
    if thoughts := _texts(first.get(_THOUGHTS), second.get(_THOUGHTS)):
        joined[_THOUGHTS] = thoughts
    return joined


def _texts(*given: Any) -> str:
    return "\n\n".join(text for text in given if text)


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
