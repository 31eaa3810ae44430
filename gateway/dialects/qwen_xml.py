"""Qwen3-Coder and Qwen3.5: <function=NAME> with a <parameter=KEY> for each argument.

A parameter's text becomes JSON by its schema; text for a string is sent as it comes, since it may
be a whole file. Lines end before and after each value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import regex  # type: ignore[import-untyped]  # matches beginnings, which re cannot
from voltapile.gateway.dialects.dialect import (
    Dialect,
    Fragment,
    Parsed,
    Tool,
    compact,
    earliest,
    first_open,
    json_rule,
    no_call,
    quoted,
    value_of,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_NAME = regex.compile(r"\s*<function=\s*([^<>\s][^<>\n]*)>")
_KEY = regex.compile(r"<parameter=([^<>\n]+)>")
_END_FUNCTION = "</function>"
_ENDS = ("</parameter>", "<parameter=", _END_FUNCTION, CLOSE)  # the first one may be forgotten
_WITH_LINE = (*_ENDS, *(f"\n{end}" for end in _ENDS))


class XmlCall:
    """One call. begun: text of it that is known already."""

    def __init__(self, tools: Sequence[Tool], begun: str = "") -> None:
        self._schemas = {tool.name: tool.schema for tool in tools}
        self._begun, self._buffer = len(begun), begun
        self._step = self._read_name
        self._fragments: list[Fragment] = []
        self._rest: str | None = None
        self._properties: Mapping[str, Any] = {}
        self._has_any = self._is_string = self._is_fresh = False
        self._is_named = False

    def push(self, text: str) -> Parsed:
        self._buffer += text
        self._fragments = []
        while self._rest is None and self._step():
            pass
        if self._rest is not None and not self._is_named:
            return no_call(self._buffer[self._begun :], self._rest)
        return Parsed(self._fragments, "", self._rest)

    def end(self, is_cut: bool) -> Parsed:
        if not self._is_named:
            is_half = is_cut and _NAME.match(self._buffer, partial=True)
            return Parsed([], "", "") if is_half else no_call(self._buffer[self._begun :])
        if is_cut or self._step == self._read_close:
            return Parsed([], "", "")
        self._fragments = []
        if self._step == self._read_value:
            self._finish_value(self._buffer.removesuffix("\n"))
        return Parsed([*self._fragments, Fragment("", "}")], "", "")

    def _give(self, arguments: str) -> None:
        self._fragments.append(Fragment("", arguments))

    # Each step reads one thing; False: more text is needed.

    def _read_name(self) -> bool:
        match = _NAME.match(self._buffer, partial=True)
        if match is None:
            body, found, rest = self._buffer.partition(CLOSE)
            if found:
                self._buffer, self._rest = body, rest
            return False
        if match.partial:
            return False
        name = match[1].strip()
        self._properties = self._schemas.get(name, {}).get("properties") or {}
        self._fragments.append(Fragment(name, "{"))
        self._is_named = True
        return self._go_on(match.end(), self._read_key)

    def _read_key(self) -> bool:
        found = earliest(self._buffer, ("<parameter=", _END_FUNCTION, CLOSE))
        if found is None:
            return False
        at, marker = found
        if marker != "<parameter=":
            self._give("}")
            return self._go_on(at, self._read_close)
        match = _KEY.match(self._buffer, at, partial=True)
        if match is None:
            return self._go_on(at + len(marker), self._read_key)
        if match.partial:
            return False
        key = match[1].strip()
        self._give(f"{',' if self._has_any else ''}{compact(key)}:")
        self._has_any = self._is_fresh = True
        self._types = _types(self._properties.get(key))
        self._is_string = self._types <= {"string"}
        if self._is_string:
            self._give('"')
        return self._go_on(match.end(), self._read_value)

    def _read_value(self) -> bool:
        if self._is_fresh and self._buffer:
            self._buffer = self._buffer.removeprefix("\n")
            self._is_fresh = False
        found = earliest(self._buffer, _WITH_LINE)
        if found is not None:
            at, marker = found
            self._finish_value(self._buffer[:at])
            skip = len(marker) if marker.endswith("</parameter>") else 0
            return self._go_on(at + skip, self._read_key)
        if self._is_string:
            keep = first_open(self._buffer, _WITH_LINE)
            if keep:
                self._give(compact(self._buffer[:keep])[1:-1])
            self._buffer = self._buffer[keep:]
        return False

    def _finish_value(self, text: str) -> None:
        self._give(compact(text)[1:] if self._is_string else _json_of(text, self._types))

    def _read_close(self) -> bool:
        """Behind the parameters."""
        text = self._buffer.lstrip()
        text = text.removeprefix(_END_FUNCTION).lstrip()
        if text.startswith(CLOSE):
            self._rest = text[len(CLOSE) :]
        elif text and not CLOSE.startswith(text) and not _END_FUNCTION.startswith(text):
            self._rest = text
        return False

    def _go_on(self, at: int, step: Any) -> bool:
        self._buffer, self._step = self._buffer[at:], step
        return True


def _types(schema: Any) -> set[str]:
    """A parameter's JSON types; of one without a schema it is a string."""
    if not isinstance(schema, Mapping):
        return {"string"}
    given = schema.get("type")
    if given is None and (parts := schema.get("anyOf") or schema.get("oneOf")):
        return set().union(*map(_types, parts))
    if given is None and "enum" in schema:
        is_text = all(isinstance(value, str) for value in schema["enum"])
        return {"string"} if is_text else {"enum"}
    if given is None:
        return {"string"} if not schema.keys() & {"properties", "items", "$ref"} else {"object"}
    return set(given) if isinstance(given, list) else {str(given)}


def _json_of(text: str, types: set[str]) -> str:
    """The value that a text stands for; a string, if it is nothing else."""
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        value = value_of(word)
    except ValueError:
        return compact(text)
    if "string" in types and not (value is None and "null" in types):
        return compact(text)
    return compact(value)


def _parser(marker: str, tools: Sequence[Tool]) -> XmlCall:
    return XmlCall(tools, "" if marker == OPEN else marker)


def _grammar(tools: Sequence[Tool], many: bool) -> str:
    lines = ["start: call" + (' ("\\n" call)*' if many else "")]
    lines.append("call: " + " | ".join(f"c{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        parts = [quoted(f"{OPEN}\n<function={tool.name}>\n")]
        required = set(tool.schema.get("required") or ())
        for j, (key, schema) in enumerate((tool.schema.get("properties") or {}).items()):
            parts.append(f"p{i}_{j}" + ("" if key in required else "?"))
            lines.append(f"p{i}_{j}: {quoted(f'<parameter={key}>' + chr(10))} v{i}_{j}")
            lines += _value_rules(f"v{i}_{j}", schema, tool.schema)
        lines.append(f"c{i}: {' '.join(parts)} {quoted(f'{_END_FUNCTION}{chr(10)}{CLOSE}')}")
    return "\n".join(lines)


def _value_rules(name: str, schema: Any, whole: Mapping[str, Any]) -> list[str]:
    after = "\n</parameter>\n"
    if _types(schema) <= {"string"}:
        choices = schema.get("enum") if isinstance(schema, Mapping) else None
        if choices:
            texts = " | ".join(quoted(str(choice)) for choice in choices)
            return [f"{name}: ({texts}) {quoted(after)}"]
        return [f"{name}[suffix={quoted(after)}]: /(?s:.*)/"]
    definitions = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    return [f"{name}: {name}j {quoted(after)}", json_rule(f"{name}j", {**schema, **definitions})]


QWEN_XML = Dialect(
    name="qwen_xml",
    opens=(OPEN, "<function="),
    marks=(OPEN, CLOSE),
    parser=_parser,
    grammar=_grammar,
)
