"""Mistral: [TOOL_CALLS] and a list of JSON objects; since 2025 the marker, a name, [ARGS] and JSON
for each call. Both are understood, and the template says which of them is asked for.

Its templates refuse ids of calls that are not nine letters or digits, so others become such.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import regex  # type: ignore[import-untyped]
from voltapile.gateway.dialects.dialect import (
    CallParser,
    Dialect,
    Parsed,
    Tool,
    json_calls_grammar,
    named_calls_grammar,
)
from voltapile.gateway.dialects.json_call import JsonCall
from voltapile.gateway.dialects.named_call import NamedCall

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAMED = regex.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
# Behind the arguments of a call in a list: its id, and the end or one more.
_TAIL = regex.compile(r'\s*(?:,\s*"id"\s*:\s*"[^"]*"\s*\})?\s*(?:(\])|,\s*(?=\{))')


class MistralCall:
    """One call. The rest of a list begins as the list has, and so is read as another one."""

    def __init__(self) -> None:
        self._buffer = ""
        self._call: CallParser | None = None
        self._is_list = self._is_over = False

    def push(self, text: str) -> Parsed:
        self._buffer += text
        if self._call is None:
            begun = self._buffer.lstrip()
            if not begun:
                return Parsed([])
            self._is_list = begun.startswith("[")
            self._call = JsonCall() if begun[0] in "[{" else NamedCall(_NAMED)
            self._buffer = begun[self._is_list :]
        parsed = Parsed([])
        if not self._is_over:
            parsed, self._buffer = self._call.push(self._buffer), ""
            if parsed.rest is None or not self._is_list or parsed.is_none:
                return parsed
            self._is_over, self._buffer = True, parsed.rest
        return parsed._replace(rest=self._rest())

    def end(self, is_cut: bool) -> Parsed:
        if self._call is None or self._is_over:
            return Parsed([], "", "")
        return self._call.end(is_cut)

    def _rest(self) -> str | None:
        match = _TAIL.match(self._buffer, partial=True)
        if match is None:
            return self._buffer
        if match.partial:
            return None
        rest = self._buffer[match.end() :]
        return rest if match[1] else f"{OPEN}[{rest}"


def call_id(given: str) -> str:
    if len(given) == 9 and given.isascii() and given.isalnum():
        return given
    return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]


def _parser(marker: str, tools: Sequence[Tool]) -> MistralCall:
    return MistralCall()


def _grammar(tools: Sequence[Tool], many: bool) -> str:
    return named_calls_grammar(tools, many, OPEN, ARGS)


def _list_grammar(tools: Sequence[Tool], many: bool) -> str:
    return json_calls_grammar(tools, many, "arguments", around=(f"{OPEN}[", "]"), between=", ")


MISTRAL, MISTRAL_LIST = (
    Dialect(
        name=name,
        opens=(OPEN,),
        marks=(OPEN, ARGS, CALL_ID),
        parser=_parser,
        grammar=grammar,
        call_id=call_id,
    )
    for name, grammar in (("mistral", _grammar), ("mistral-list", _list_grammar))
)
