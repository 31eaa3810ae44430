"""Hermes and Qwen 2.5/3: {"name": ..., "arguments": {...}} between <tool_call> and </tool_call>."""

from __future__ import annotations

from collections.abc import Sequence

from voltapile.gateway.dialects.dialect import Dialect, Tool, json_calls_grammar
from voltapile.gateway.dialects.json_call import JsonCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _parser(marker: str, tools: Sequence[Tool]) -> JsonCall:
    return JsonCall(CLOSE)


def _grammar(tools: Sequence[Tool], many: bool) -> str:
    return json_calls_grammar(tools, many, "arguments", (f"{OPEN}\n", f"\n{CLOSE}"))


HERMES = Dialect(
    name="hermes", opens=(OPEN,), marks=(OPEN, CLOSE), parser=_parser, grammar=_grammar
)
