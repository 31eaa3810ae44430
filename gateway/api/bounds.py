"""Bounds: what an answer must keep to, from the request to the engine's Guide and ThoughtLimit.

Puts together what the client asked for, calls that it forces, and the reasoning that a model may do
before either. Grammars are compiled in a thread. It does not know how masks reach a worker.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from voltapile.gateway.api.errors import ApiError, bad_request
from voltapile.gateway.api.options import Options
from voltapile.gateway.api.reading import Reading
from voltapile.gateway.api.services import Services
from voltapile.gateway.api.structured import Constraint, refused
from voltapile.gateway.dialects.dialect import Tool, quoted
from voltapile.gateway.grammar import GrammarError, Guide, lark_of, lark_of_regex
from voltapile.gateway.schemas import endless, explained, json_grammar
from voltapile.gateway.thought import ThoughtLimit
from voltapile.gateway.tokenizer import Tokenizer

_START = re.compile(r"^start\b", re.MULTILINE)


class Bounds(NamedTuple):
    guide: Guide | None = None
    limit: ThoughtLimit | None = None

    def another(self) -> Bounds:
        """For one more answer."""
        return self._replace(guide=self.guide.copy() if self.guide else None)


async def bounds_of(services: Services, options: Options, reading: Reading | None = None) -> Bounds:
    """reading: of a chat. Raises a 400 that names the field and what is wrong with it."""
    limit = _limit(services.tokenizer, options.thought_tokens, reading)
    asked = options.constraint
    is_forced = reading is not None and reading.use.is_forced
    if asked is None and not is_forced:
        return Bounds(None, limit)
    param = "tools" if asked is None else asked.param
    if asked is not None and is_forced:
        raise bad_request(f"'tool_choice' forces a call, which '{param}' has no room for", param)
    try:
        if reading is not None:
            _check_ends(reading.use.tools)
        guide = await asyncio.to_thread(_guide, services, asked, reading)
    except GrammarError as error:
        if reading is not None:
            await asyncio.to_thread(_check_each, services, reading.use.tools)
        raise refused(param, explained(str(error))) from error
    return Bounds(guide, limit)


def _check_ends(tools: Sequence[Tool]) -> None:
    for tool in tools:
        if ref := endless(tool.schema):
            raise _refused_tool(tool, f"the keyword '$ref': {ref} always holds itself")


def _check_each(services: Services, tools: Sequence[Tool]) -> None:
    """Whose fault it is, if one of them cannot be compiled."""
    for tool in tools:
        try:
            services.grammars.guide(json_grammar(tool.schema))
        except GrammarError as error:
            raise _refused_tool(tool, explained(str(error))) from error


def _refused_tool(tool: Tool, why: str) -> ApiError:
    return refused("tools", f"the parameters of '{tool.name}': {why}")


def _guide(services: Services, asked: Constraint | None, reading: Reading | None) -> Guide:
    lark = _asked_lark(asked) if asked else ""
    if reading is not None and reading.use.tools:
        calls = reading.dialect.grammar(reading.use.tools, reading.use.many)
        calls = _with_controls(services.tokenizer, calls, reading.dialect.marks)
        if not lark:
            lark = calls
        elif asked is not None and asked.is_schema:  # an answer, or calls on the way to it
            either = _START.sub("whole", lark), _START.sub("calls", calls)
            lark = "\n".join([*either, "start: whole | calls"])
    if reading is not None:
        lark = _with_thought(services.tokenizer, lark, reading)
    return services.grammars.guide(lark)


def _asked_lark(asked: Constraint) -> str:
    if asked.gbnf:
        return lark_of(asked.gbnf)
    return lark_of_regex(asked.regex) if asked.regex else asked.lark


def _with_thought(tokenizer: Tokenizer, lark: str, reading: Reading) -> str:
    """With the reasoning that may come before, free up to its end marker."""
    marks = reading.thinks
    if marks is None or reading.is_closed:
        return lark
    thought = (
        "thought space thought_then"
        if reading.is_open
        else (f"({_marker(tokenizer, marks.open)} thought space)? thought_then")
    )
    token = _control(tokenizer, marks.close)
    if token is None:
        rule = f"thought[suffix={quoted(marks.close)}]: /(?s:.*)/"
    else:
        rule = f"thought: /(?s:.*)/ <[{token}]>"
    body = _START.sub("thought_then", lark)
    return f"{body}\nstart: {thought}\n{rule}\nspace: /\\s*/"


def _with_controls(tokenizer: Tokenizer, lark: str, marks: Iterable[str]) -> str:
    """With those markers as tokens that are control tokens, and so stand for no text."""
    lines = lark.split("\n")
    for mark in marks:
        if (token := _control(tokenizer, mark)) is not None:
            shown, name = quoted(mark)[1:-1], f"<[{token}]>"
            for i, line in enumerate(lines):
                if shown in line and "%json" not in line:  # a schema is its author's
                    line = line.replace(shown, f'" {name} "')
                    lines[i] = line.replace(f'"" {name}', name).replace(f'{name} ""', name)
    return "\n".join(lines)


def _marker(tokenizer: Tokenizer, text: str) -> str:
    token = _control(tokenizer, text)
    return quoted(text) if token is None else f"<[{token}]>"


def _control(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of a control token, which stands for no text; None for any other text."""
    ids = tokenizer.encode(text.strip(), add_special=False)
    return ids[0] if len(ids) == 1 and tokenizer.is_special(ids[0]) else None


def _limit(tokenizer: Tokenizer, budget: int, reading: Reading | None) -> ThoughtLimit | None:
    if budget < 0 or reading is None or reading.thinks is None or reading.is_closed:
        return None
    opens, closes = (tuple(tokenizer.encode(text, add_special=False)) for text in reading.thinks)
    mark = tokenizer.join(closes, special=True)
    opens = () if reading.is_open else opens
    return ThoughtLimit(budget, opens, closes, mark, lambda ids: tokenizer.join(ids, special=True))
