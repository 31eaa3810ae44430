"""Gemma: call:NAME{key:value,...} between markers of its own, with strings in a token of quotes.

A call is read when it is complete. JSON in its place is understood too: forced calls are JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from voltapile.gateway.dialects.dialect import (
    Dialect,
    Fragment,
    Parsed,
    Tool,
    compact,
    json_rule,
    no_call,
    quoted,
)

CLOSES = {"<|tool_call>": "<tool_call|>", "<start_function_call>": "<end_function_call>"}
QUOTES = ('<|"|>', "<escape>", '"')
_HEAD = re.compile(r"\s*call:\s*([^\s{]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([^:{}\[\],\s]+)\s*:")
_WORD = re.compile(r"[^,}\]]*")
MAX_DEPTH = 64


class GemmaCall:
    """One call, up to its closing marker."""

    def __init__(self, close: str) -> None:
        self._close, self._buffer = close, ""

    def push(self, text: str) -> Parsed:
        self._buffer += text
        body, found, rest = self._buffer.partition(self._close)
        return self._parsed(body, rest) if found else Parsed([])

    def end(self, is_cut: bool) -> Parsed:
        parsed = self._parsed(self._buffer, "")
        return Parsed([], "", "") if is_cut and parsed.is_none else parsed

    def _parsed(self, body: str, rest: str) -> Parsed:
        try:
            head = _HEAD.match(body)
            if head is None:
                raise ValueError("no name")
            arguments = _Reader(body, head.end()).value(0)
        except (ValueError, IndexError):
            return no_call(body, rest)
        return Parsed([Fragment(head[1], compact(arguments))], "", rest)


class _Reader:
    """Values from a text. Raises ValueError or IndexError where there are none."""

    def __init__(self, text: str, at: int) -> None:
        self._text, self._at = text, at

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        self._skip_space()
        if self._takes("{"):
            return self._object(depth)
        if self._takes("["):
            return self._list(depth)
        for quote in QUOTES:
            if self._takes(quote):
                return self._string(quote)
        return self._word()

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._closed("}"):
            key = self._key()  # before its value
            found[key] = self.value(depth + 1)
        return found

    def _list(self, depth: int) -> list[Any]:
        found = []
        while not self._closed("]"):
            found.append(self.value(depth + 1))
        return found

    def _key(self) -> str:
        for quote in QUOTES:
            if self._takes(quote):
                key = self._string(quote)
                self._skip_space()
                if not self._takes(":"):
                    raise ValueError("no colon")
                return key
        match = _KEY.match(self._text, self._at)
        if match is None:
            raise ValueError("no key")
        self._at = match.end()
        return str(match[1])

    def _string(self, quote: str) -> str:
        """Up to the same quote again; only JSON's own has escapes."""
        end = self._text.index(quote, self._at)
        while quote == '"' and _is_escaped(self._text, self._at, end):
            end = self._text.index(quote, end + 1)
        text, self._at = self._text[self._at : end], end + len(quote)
        return _unescaped(text) if quote == '"' else text

    def _word(self) -> Any:
        match = _WORD.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        word = match[0].strip()
        if word in ("true", "false", "null", "None"):
            return {"true": True, "false": False}.get(word)
        for kind in (int, float):
            try:
                number = kind(word)
            except ValueError:
                continue
            if number == number and abs(number) != float("inf"):
                return number
        return word

    def _closed(self, bracket: str) -> bool:
        self._skip_space()
        self._takes(",")
        self._skip_space()
        if self._at >= len(self._text):
            raise ValueError(f"no {bracket}")
        return self._takes(bracket)

    def _takes(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def _skip_space(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1


def _is_escaped(text: str, first: int, at: int) -> bool:
    count = 0
    while at - 1 - count >= first and text[at - 1 - count] == "\\":
        count += 1
    return count % 2 == 1


def _unescaped(text: str) -> str:
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text


def _grammar(open_: str) -> Callable[[Sequence[Tool], bool], str]:
    def grammar(tools: Sequence[Tool], many: bool) -> str:
        lines = ["start: call" + ("+" if many else "")]
        lines.append("call: " + " | ".join(f"c{i}" for i in range(len(tools))))
        for i, tool in enumerate(tools):
            head, tail = quoted(f"{open_}call:{tool.name}"), quoted(CLOSES[open_])
            lines += [f"c{i}: {head} a{i} {tail}", json_rule(f"a{i}", tool.schema)]
        return "\n".join(lines)

    return grammar


def _parser(marker: str, tools: Sequence[Tool]) -> GemmaCall:
    return GemmaCall(CLOSES[marker])


GEMMA4, FUNCTION_GEMMA = (
    Dialect(
        name=name,
        opens=(open_,),
        marks=(open_, CLOSES[open_], quote),
        parser=_parser,
        grammar=_grammar(open_),
    )
    for name, open_, quote in zip(("gemma4", "function-gemma"), CLOSES, QUOTES, strict=False)
)
