"""Llama 3: an answer is {"name": ..., "parameters": {...}}, may be behind <|python_tag|>."""

from __future__ import annotations

from collections.abc import Sequence

from voltapile.gateway.dialects.dialect import Dialect, Tool, json_calls_grammar
from voltapile.gateway.dialects.json_call import JsonCall

TAG = "<|python_tag|>"


def _parser(marker: str, tools: Sequence[Tool]) -> JsonCall:
    names = None if marker == TAG else {tool.name for tool in tools}
    return JsonCall(names=names, begun="" if marker == TAG else marker)


def _grammar(tools: Sequence[Tool], many: bool) -> str:
    return json_calls_grammar(tools, False, "parameters")  # these models make one call at a time


LLAMA3 = Dialect(
    name="llama3", opens=(TAG,), firsts=("{",), marks=(TAG,), parser=_parser, grammar=_grammar
)
