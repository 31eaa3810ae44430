"""Splitter: what an answer's text is: reasoning, content, or tool calls.

One small state machine over text that arrives in pieces. It holds back only what may still become a
marker, and gives out no marker. It knows dialects, and neither tokens nor HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from voltapile.gateway.dialects.dialect import (
    CallParser,
    Dialect,
    Fragment,
    Parsed,
    Tool,
    earliest,
    first_open,
)
from voltapile.gateway.dialects.recognise import Reasoning


class Split(msgspec.Struct):
    """What some text was; each kind, joined over time, is whole."""

    content: str = ""
    reasoning: str = ""
    calls: list[Fragment] = []

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.calls)


class Splitter:
    """push(text) for each piece, flush at the end.

    reasoning None: none is taken out. tools: those that may be called; none: calls are text.
    is_reasoning: the prompt has opened the reasoning already. many: more than one call may come;
    otherwise the splitter is_over behind the first, and drops the rest. has_calls: one was found.
    """

    def __init__(
        self,
        dialect: Dialect,
        tools: Sequence[Tool] = (),
        reasoning: Reasoning | None = None,
        is_reasoning: bool = False,
        many: bool = True,
    ) -> None:
        self._dialect, self._tools, self._markers = dialect, tools, reasoning
        self._many = many
        self.has_calls = self.is_over = False
        self.is_reasoning = is_reasoning and reasoning is not None
        self._call: CallParser | None = None
        self._buffer = self._opener = ""
        self._is_first = True  # no content yet
        self._is_fresh = self.is_reasoning  # right behind a marker of reasoning: space is dropped

    @property
    def may_turn(self) -> bool:
        """Amid the next text tokens may begin or cease to count, as reasoning or at all."""
        may_reason = self.is_reasoning or (self._markers is not None and self._is_first)
        return may_reason or not self._many

    def push(self, text: str) -> Split:
        self._buffer += text
        split = Split()
        while not self.is_over and self._step(split):
            pass
        return split

    def flush(self, is_cut: bool = False) -> Split:
        """At the end; is_cut: by the token limit."""
        split = Split()
        while self._call is not None:  # as there is none any more where it is_over
            self._take(self._call.end(is_cut), split)
            while not self.is_over and self._step(split):
                pass
        if self.is_over:
            return split
        text, self._buffer = self._buffer, ""
        if self.is_reasoning:
            split.reasoning += text.rstrip()
        else:
            split.content += text.lstrip() if self._is_fresh else text
        return split

    def _step(self, split: Split) -> bool:
        """False: more text is needed."""
        if self._call is not None:
            text, self._buffer = self._buffer, ""
            return self._take(self._call.push(text), split)
        return self._reason(split) if self.is_reasoning else self._speak(split)

    def _reason(self, split: Split) -> bool:
        assert self._markers is not None
        self._drop_space()
        close = self._markers.close
        before, found, rest = self._buffer.partition(close)
        # Space before the marker belongs to it.
        keep = len(before) if found else first_open(before, (close,))
        text = before[:keep].rstrip()
        split.reasoning += text
        if found:
            self._buffer, self.is_reasoning, self._is_fresh = rest, False, True
        else:
            self._buffer = before[len(text) :]
        return bool(found)

    def _speak(self, split: Split) -> bool:
        self._drop_space()
        if self._is_first:
            text, markers = self._buffer.lstrip(), self._openers()
            marker = next((each for each in markers if text.startswith(each)), "")
            if marker:
                self._open(marker, text[len(marker) :])
                return True
            if any(each.startswith(text) for each in markers):
                return False  # space before a call or reasoning is none of the content
            self._is_first = False
        markers = self._openers()
        at, marker = earliest(self._buffer, markers) or (first_open(self._buffer, markers), "")
        split.content += self._buffer[:at]
        self._buffer = self._buffer[at:]
        if marker:
            self._open(marker, self._buffer[len(marker) :])
        return bool(marker)

    def _openers(self) -> tuple[str, ...]:
        """What may open something here. Some markers count only where no content has come."""
        openers: tuple[str, ...] = ()
        if self._tools:
            dialect = self._dialect
            openers = dialect.opens + dialect.firsts if self._is_first else dialect.opens
        if self._markers is not None and self._is_first:
            openers += (self._markers.open,)
        return openers

    def _open(self, marker: str, rest: str) -> None:
        self._buffer, self._opener = rest, marker
        if self._markers is not None and marker == self._markers.open:
            self.is_reasoning = self._is_fresh = True
        else:
            self._call = self._dialect.parser(marker, self._tools)

    def _take(self, parsed: Parsed, split: Split) -> bool:
        split.calls += parsed.fragments
        self.has_calls |= bool(parsed.fragments)
        if parsed.rest is None:
            return False
        self._call, self._buffer = None, parsed.rest
        self.is_over = self.has_calls and not self._many
        if parsed.is_none:
            self._speak_on(parsed, split)
        else:
            self._is_fresh = True  # space between calls is no content
        return True

    def _speak_on(self, parsed: Parsed, split: Split) -> None:
        """It was no call: a real one may stand in the text behind the marker."""
        shown = "" if self._opener in self._dialect.marks else self._opener
        split.content += shown
        self._is_first &= not (shown or parsed.text)
        self._is_fresh = self._is_first
        self._buffer = parsed.text + self._buffer

    def _drop_space(self) -> None:
        if self._is_fresh:
            self._buffer = self._buffer.lstrip()
            self._is_fresh = not self._buffer
