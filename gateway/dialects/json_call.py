"""JsonCall: a tool call written as {"name": ..., "arguments": {...}}, read while it is written.

Hermes, Llama 3 and plain JSON share it. Arguments leave as they come once the name is known; a call
in another order of keys waits for its end. It does not know what opened it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeGuard

import regex  # type: ignore[import-untyped]  # matches beginnings, which re cannot
from voltapile.gateway.dialects.dialect import (
    Fragment,
    Parsed,
    compact,
    no_call,
    value_of,
    well_formed,
)
from voltapile.gateway.dialects.json_text import JsonScanner

_NAME = regex.compile(r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"]*)')
_HEAD = regex.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")'
    r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?P<value>\{)'
)
ARGUMENTS = ("arguments", "parameters")


class JsonCall:
    """close: the marker behind the call, "" where there is none. names: those that make it a call;
    None: any does. begun: text of it that is known already."""

    def __init__(
        self, close: str = "", names: Collection[str] | None = None, begun: str = ""
    ) -> None:
        self._close, self._names = close, names
        self._begun, self._buffer = len(begun), begun
        self._scanner: JsonScanner | None = None  # of the arguments, once they have begun
        self._is_whole = False  # it must be read as a whole
        self._is_over = False  # only its end is still to come

    def push(self, text: str) -> Parsed:
        self._buffer += text
        fragments: list[Fragment] = []
        if self._scanner is None and not self._is_whole:
            self._read_head(fragments)
        if self._is_whole:
            # Where no marker told of a call, it is one if it begins as one.
            return self._read_whole() if self._names is None else self._none()
        if self._scanner is not None and not self._is_over:
            self._read_arguments(self._scanner, fragments)
        return Parsed(fragments, "", self._rest() if self._is_over else None)

    def end(self, is_cut: bool) -> Parsed:
        if self._is_over:
            return Parsed([], "", "")
        if self._scanner is None:
            fragments = self._calls(self._buffer)
            is_none = not fragments and not (is_cut and self._is_half())
            return self._none() if is_none else Parsed(fragments, "", "")
        closing = "" if is_cut else self._scanner.closing()
        return Parsed([Fragment("", closing)] if closing else [], "", "")

    def _none(self) -> Parsed:
        return no_call(self._buffer[self._begun :])

    def _is_half(self) -> bool:
        """What has come so far is the beginning of a call."""
        if self._names is None:
            return True  # a marker told of one
        named = _NAME.match(self._buffer)
        may_be = named is None or any(name.startswith(named["name"]) for name in self._names)
        return may_be and _HEAD.match(self._buffer, partial=True) is not None

    def _is_name(self, name: Any) -> TypeGuard[str]:
        """Without one a fragment would go on with the call before it."""
        if not isinstance(name, str) or not name.strip():
            return False
        return self._names is None or name in self._names

    def _read_head(self, fragments: list[Fragment]) -> None:
        match = _HEAD.match(self._buffer, partial=True)
        if match is None:
            self._is_whole = True
        elif not match.partial:
            name = _loaded(match["name"])
            if not self._is_name(name):
                self._is_whole = True
                return
            fragments.append(Fragment(well_formed(name), ""))
            self._buffer = self._buffer[match.start("value") :]
            self._scanner = JsonScanner()

    def _read_arguments(self, scanner: JsonScanner, fragments: list[Fragment]) -> None:
        arguments = scanner.feed(self._buffer)
        self._buffer = self._buffer[scanner.used :]
        if scanner.is_broken:
            arguments += scanner.closing()
        if arguments:
            fragments.append(Fragment("", arguments))
        self._is_over = scanner.is_done or scanner.is_broken

    def _rest(self) -> str | None:
        """Behind the arguments: the object's brace and the closing marker, if they come."""
        assert self._scanner is not None
        if self._close and self._scanner.is_broken:
            at = self._buffer.find(self._close)
            return self._buffer[at + len(self._close) :] if at >= 0 else None
        text = self._buffer.lstrip()
        if text.startswith("}"):
            text = text[1:].lstrip()
        elif not text:
            return None
        if not self._close or text.startswith(self._close):
            return text[len(self._close) :]
        return None if self._close.startswith(text) else text

    def _read_whole(self) -> Parsed:
        """Up to the closing marker; without one the JSON itself says where it ends."""
        if self._close:
            body, found, rest = self._buffer.partition(self._close)
            if not found:
                return Parsed([])
        else:
            scanner = JsonScanner()
            scanner.feed(self._buffer)
            if scanner.is_broken:
                return self._none()
            if not scanner.is_done:
                return Parsed([])
            body, rest = self._buffer[: scanner.used], self._buffer[scanner.used :]
        fragments = self._calls(body)
        return Parsed(fragments, "", rest) if fragments else no_call(body[self._begun :], rest)

    def _calls(self, body: str) -> list[Fragment]:
        """Those of a complete text: an object, or a list of them. [] if it is no call."""
        value = _loaded(body)
        calls = value if isinstance(value, list) else [value]
        fragments = []
        for call in calls:
            name = call.get("name") if isinstance(call, dict) else None
            if not self._is_name(name):
                return []
            given: Any = next((call[key] for key in ARGUMENTS if key in call), {})
            if isinstance(given, str):
                given = _loaded(given or "{}")
            arguments = compact(given if isinstance(given, dict) else {})
            fragments.append(Fragment(well_formed(name), arguments))
        return fragments


def _loaded(text: str) -> Any:
    """None also for what is no JSON."""
    try:
        return value_of(text)
    except ValueError:
        return None
