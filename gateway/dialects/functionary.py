"""Functionary and its like: a JSON object between <function=NAME> and </function>."""

from __future__ import annotations

from collections.abc import Sequence

import regex  # type: ignore[import-untyped]
from voltapile.gateway.dialects.dialect import Dialect, Tool, named_calls_grammar
from voltapile.gateway.dialects.named_call import NamedCall

OPEN, CLOSE = "<function=", "</function>"
_HEAD = regex.compile(r"\s*([^\s<>{]+)\s*>\s*(?=\{)")


def _parser(marker: str, tools: Sequence[Tool]) -> NamedCall:
    return NamedCall(_HEAD, CLOSE)


def _grammar(tools: Sequence[Tool], many: bool) -> str:
    return named_calls_grammar(tools, many, OPEN, ">", CLOSE)


FUNCTIONARY = Dialect(
    name="functionary", opens=(OPEN,), marks=(OPEN, CLOSE), parser=_parser, grammar=_grammar
)
