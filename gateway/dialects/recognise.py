"""Which dialect a model speaks: read off its chat template, as files say it nowhere else.

It looks at the template's text and never renders it.
"""

from __future__ import annotations

from typing import NamedTuple

from voltapile.gateway.dialects import deepseek
from voltapile.gateway.dialects.deepseek import DEEPSEEK, DEEPSEEK_UNTOLD
from voltapile.gateway.dialects.dialect import Dialect
from voltapile.gateway.dialects.functionary import FUNCTIONARY
from voltapile.gateway.dialects.gemma import FUNCTION_GEMMA, GEMMA4
from voltapile.gateway.dialects.hermes import HERMES
from voltapile.gateway.dialects.llama3 import LLAMA3
from voltapile.gateway.dialects.mistral import MISTRAL, MISTRAL_LIST
from voltapile.gateway.dialects.plain import PLAIN, UNTAUGHT, UNTOLD
from voltapile.gateway.dialects.qwen_xml import QWEN_XML


class Reasoning(NamedTuple):
    """The markers around a model's reasoning."""

    open: str
    close: str


# The first one that a template holds; the order matters where one format contains another.
_DIALECTS = (
    ("<parameter=", QWEN_XML),
    ("<function=", FUNCTIONARY),
    ("<tool_call>", HERMES),
    ("<|tool_call>", GEMMA4),
    ("<start_function_call>", FUNCTION_GEMMA),
    ("[ARGS]", MISTRAL),
    ("[TOOL_CALLS]", MISTRAL_LIST),
    (deepseek.BEGIN, DEEPSEEK),
    ("<|python_tag|>", LLAMA3),
    ("<|start_header_id|>", LLAMA3),
)
_REASONING = (
    Reasoning("<think>", "</think>"),
    Reasoning("<seed:think>", "</seed:think>"),
    Reasoning("[THINK]", "[/THINK]"),
    Reasoning("<|channel>thought\n", "<channel|>"),
    Reasoning("<reasoning>", "</reasoning>"),
)


def dialect_of(template: str) -> Dialect:
    if "tools" not in template:
        if deepseek.BEGIN in template:
            return DEEPSEEK_UNTOLD
        return UNTOLD if "tool_calls" in template else UNTAUGHT
    return next((dialect for text, dialect in _DIALECTS if text in template), PLAIN)


def reasoning_of(template: str) -> Reasoning | None:
    """None: the template knows of no reasoning."""
    return next((r for r in _REASONING if r.close in template), None)
