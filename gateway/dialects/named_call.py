"""NamedCall: a tool call whose name stands before its JSON arguments, read while it is written.

Mistral, DeepSeek and Functionary share it. Arguments leave as they come. It does not know what
opened it.
"""

from __future__ import annotations

import regex  # type: ignore[import-untyped]  # matches beginnings, which re cannot
from voltapile.gateway.dialects.dialect import Fragment, Parsed, no_call
from voltapile.gateway.dialects.json_text import JsonScanner


class NamedCall:
    """head: what comes up to the arguments; its first group is the name. close: the marker behind
    them, "" where there is none."""

    def __init__(self, head: regex.Pattern[str], close: str = "") -> None:
        self._head, self._close = head, close
        self._tail = regex.compile(rf"\s*(?:```)?\s*{regex.escape(close)}") if close else None
        self._buffer = ""
        self._scanner: JsonScanner | None = None  # of the arguments, once they have begun

    def push(self, text: str) -> Parsed:
        self._buffer += text
        fragments: list[Fragment] = []
        if self._scanner is None:
            match = self._head.match(self._buffer, partial=True)
            if match is None:
                return no_call(self._buffer)
            if match.partial:
                return Parsed([])
            fragments.append(Fragment(match[1], ""))
            self._buffer = self._buffer[match.end() :]
            self._scanner = JsonScanner()
        scanner = self._scanner
        if not _is_over(scanner):
            arguments = scanner.feed(self._buffer)
            self._buffer = self._buffer[scanner.used :]
            if scanner.is_broken:
                arguments += scanner.closing()
            if arguments:
                fragments.append(Fragment("", arguments))
        return Parsed(fragments, "", self._rest(scanner))

    def end(self, is_cut: bool) -> Parsed:
        if self._scanner is None:
            return Parsed([], "", "") if is_cut else no_call(self._buffer)
        if is_cut or _is_over(self._scanner):
            return Parsed([], "", "")
        return Parsed([Fragment("", self._scanner.closing())], "", "")

    def _rest(self, scanner: JsonScanner) -> str | None:
        """What follows the call; None: that is not known yet."""
        if not _is_over(scanner):
            return None
        if self._tail is None:
            return self._buffer
        if scanner.is_broken:
            _, found, rest = self._buffer.partition(self._close)
            return rest if found else None
        match = self._tail.match(self._buffer, partial=True)
        if match is None:
            return self._buffer
        return None if match.partial else self._buffer[match.end() :]


def _is_over(scanner: JsonScanner) -> bool:
    return scanner.is_done or scanner.is_broken
