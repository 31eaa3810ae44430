"""What clients say of tools: `tools`, `tool_choice`, and the calls in earlier messages.

It reads and checks OpenAI's forms; which dialect a model speaks is the template's affair.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from voltapile.gateway.api.errors import ApiError, bad_request
from voltapile.gateway.api.fields import Fields, kind
from voltapile.gateway.dialects.dialect import Tool

MAX_TOOLS = 512
_NAME = re.compile(r'[^\s"<>{}=\\]{1,128}')  # it stands between such characters in some dialects
NO_SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """shown: what the template is given. tools: those that may be called. is_forced: one of them
    must be. many: one answer may hold several calls."""

    shown: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)
    is_forced: bool = False
    many: bool = True


NO_TOOLS = ToolUse()


def tool_use(fields: Fields) -> ToolUse:
    """Raises a 400 that names what is wrong."""
    given = fields.values.get("tools")
    if given is not None and not isinstance(given, list):
        raise bad_request(f"'tools' must be a list, not {kind(given)}", "tools", "invalid_type")
    if given and len(given) > MAX_TOOLS:
        raise bad_request(f"{len(given)} tools; at most {MAX_TOOLS}", "tools", "out_of_range")
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given or ())]
    names = [tool.name for tool in tools]
    if twice := [name for name in names if names.count(name) > 1]:
        raise bad_request(f"'tools' has '{twice[0]}' more than once", "tools")
    many = fields.flag("parallel_tool_calls", default=True)
    choice, wanted = _choice(fields.values.get("tool_choice"))
    if (choice in ("required", "named") or wanted) and not tools:
        raise bad_request("'tool_choice' needs 'tools'", "tool_choice")
    if choice == "none" or not tools:
        return NO_TOOLS
    if missing := [name for name in wanted if name not in names]:
        message = f"'tool_choice' names '{missing[0]:.80}', which 'tools' has not"
        raise bad_request(message, "tool_choice")
    return ToolUse(
        shown=list(given or ()),  # all of them: a prompt that changes is not found in the cache
        tools=[tool for tool in tools if not wanted or tool.name in wanted],
        is_forced=choice != "auto",
        many=many and choice != "named",
    )


def checked_calls(message: dict[str, Any], param: str) -> dict[str, Any]:
    """A message whose tool_calls can be rendered; without the key where it holds nothing."""
    calls = message.get("tool_calls")
    if "tool_calls" not in message:
        return message
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    if calls is None or calls == []:
        return rest
    if not isinstance(calls, list):
        where = f"{param}.tool_calls"
        raise bad_request(f"'{where}' must be a list, not {kind(calls)}", where, "invalid_type")
    return rest | {
        "tool_calls": [_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(calls)]
    }


def _call(call: Any, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise bad_request(f"'{param}' must be an object with a function", param, "invalid_type")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        where = f"{param}.function.name"
        given = kind(name) if name != "" else "an empty one"
        raise bad_request(f"'{where}' must be a string, not {given}", where, "invalid_type")
    if arguments is not None and not isinstance(arguments, str | dict):
        where = f"{param}.function.arguments"
        what = f"'{where}' must be a string of JSON or an object, not {kind(arguments)}"
        raise bad_request(what, where, "invalid_type")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _tool(tool: Any, param: str) -> Tool:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise bad_request(f"'{param}' must be a function", param, "unsupported_tool")
    function = tool.get("function")
    if not isinstance(function, dict):
        where = f"{param}.function"
        raise bad_request(f"'{where}' must be an object, not {kind(function)}", where)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        where = f"{param}.function.name"
        message = f"'{where}' must be a name of 1 to 128 characters without spaces, quotes, <>{{}}="
        raise bad_request(message, where)
    description, schema = function.get("description"), function.get("parameters")
    if description is not None and not isinstance(description, str):
        raise _wrong(f"{param}.function.description", "a string", description)
    if schema is not None and not isinstance(schema, dict):
        raise _wrong(f"{param}.function.parameters", "an object", schema)
    return Tool(name, description or "", _of_object(schema, f"{param}.function.parameters"))


def _of_object(schema: dict[str, Any] | None, param: str) -> dict[str, Any]:
    """What the schema leaves open: arguments are an object."""
    if not schema:
        return NO_SCHEMA
    types = schema.get("type") or "object"
    if "object" not in (types if isinstance(types, list) else [types]):
        message = f"'{param}' must be the schema of an object: arguments have names"
        raise bad_request(message, f"{param}.type", "invalid_schema")
    return {**schema, "type": "object"}


def _choice(value: Any) -> tuple[str, list[str]]:
    """("none" | "auto" | "required" | "named", the only functions that may be called; []: all)."""
    if value is None:
        return "auto", []
    if isinstance(value, str):
        if value in ("none", "auto", "required"):
            return value, []
        message = f"'tool_choice' must be none, auto, required or a function, not '{value:.40}'"
        raise bad_request(message, "tool_choice")
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed(Fields(value, "tool_choice.").object("allowed_tools"))
    return "named", [_function_name(value)]


def _allowed(fields: Fields) -> tuple[str, list[str]]:
    mode = fields.text("mode") or "auto"
    if mode not in ("auto", "required"):
        message = f"'tool_choice.allowed_tools.mode' must be auto or required, not '{mode:.40}'"
        raise bad_request(message, "tool_choice.allowed_tools.mode")
    names = [_function_name(tool) for tool in fields.list("tools")]
    return (mode, names) if names else ("none", [])


def _function_name(value: Any) -> str:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        message = "'tool_choice' must be a string, or an object that names a function"
        raise bad_request(message, "tool_choice", "invalid_type")
    return name


def _wrong(name: str, wanted: str, value: Any) -> ApiError:
    return bad_request(f"'{name}' must be {wanted}, not {kind(value)}", name, "invalid_type")
