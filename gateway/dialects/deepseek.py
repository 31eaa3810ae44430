"""DeepSeek: name and JSON arguments between markers of its own, the arguments in a fence at times.

The distilled Qwen and Llama models know calls and are not shown tools by their template: tools are
told in the system message then, and plain JSON is understood as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import regex  # type: ignore[import-untyped]
from voltapile.gateway.dialects.dialect import (
    CallParser,
    Dialect,
    Parsed,
    Tool,
    named_calls_grammar,
)
from voltapile.gateway.dialects.named_call import NamedCall
from voltapile.gateway.dialects.plain import PLAIN, UNTOLD

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
# function<sep>NAME and a fence, or NAME<sep>.
_HEAD = regex.compile(
    rf"\s*(?:function\s*{SEPARATOR})?\s*([^\s<{{`]+)\s*(?:{SEPARATOR})?\s*(?:```(?:json)?)?\s*(?=\{{)"
)


class _Nothing:
    """The markers around all calls say nothing."""

    def push(self, text: str) -> Parsed:
        return Parsed([], "", text)

    def end(self, is_cut: bool) -> Parsed:
        return Parsed([], "", "")


def _parser(marker: str, tools: Sequence[Tool]) -> CallParser:
    if marker in (BEGIN, END):
        return _Nothing()
    return NamedCall(_HEAD, CLOSE) if marker == OPEN else PLAIN.parser(marker, tools)


def _grammar(tools: Sequence[Tool], many: bool) -> str:
    head, between = f"{OPEN}function{SEPARATOR}", "\n```json\n"
    return named_calls_grammar(tools, many, head, between, f"\n```{CLOSE}", (BEGIN, END))


DEEPSEEK = Dialect(
    name="deepseek",
    opens=(BEGIN, OPEN, END),
    firsts=PLAIN.firsts,
    marks=(BEGIN, OPEN, SEPARATOR, CLOSE, END),
    parser=_parser,
    grammar=_grammar,
)
DEEPSEEK_UNTOLD = replace(DEEPSEEK, prepared=UNTOLD.prepared)
