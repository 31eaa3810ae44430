"""Dialect: how a family of models writes tool calls and marks its reasoning.

One small file each beside this one; recognise.py says which of them a template asks for. A dialect
knows texts only: no tokens, no HTTP, and nothing of how its pieces are sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol

# No more space between the parts of an answer than a printed one has: small models never end it.
# oneOf is read as anyOf, as in other servers, where its branches may not exclude each other.
JSON_OPTIONS = {"whitespace_pattern": r"[ ]|\n[ ]{0,32}", "coerce_one_of": True}
Messages = list[dict[str, Any]]


class Fragment(NamedTuple):
    """A piece of a tool call. name: of a call that begins here, else "". The arguments of a call's
    fragments, joined, are a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Tool:
    """A function that may be called. schema: of its arguments."""

    name: str
    description: str = ""
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})


class Parsed(NamedTuple):
    """What some more text of a call gave. rest: what follows its end; None while it is open.
    is_none: it is no call at all, and text is what stands between its marker and the rest."""

    fragments: list[Fragment]
    text: str = ""
    rest: str | None = None
    is_none: bool = False


def no_call(text: str, rest: str = "") -> Parsed:
    return Parsed([], text, rest, True)


class CallParser(Protocol):
    """Reads one tool call, from behind the marker that opened it."""

    def push(self, text: str) -> Parsed: ...

    def end(self, is_cut: bool) -> Parsed:
        """Nothing more comes. is_cut: the answer ended at its token limit."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """opens: texts that begin a call anywhere. firsts: those that do so only where nothing but
    space comes before. marks: all markers that no text holds, some of which a vocabulary may hide;
    what opens and is none of them is text where no call follows.

    grammar: of calls of some of the tools, in llguidance's Lark; `many` if more than one may come.
    prepared: messages with tools and calls as text, for templates that know of neither.
    call_id: an id of a call as its template wants it.
    """

    name: str
    opens: tuple[str, ...] = ()
    firsts: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    parser: Callable[[str, Sequence[Tool]], CallParser]  # of the marker that was met
    grammar: Callable[[Sequence[Tool], bool], str]
    prepared: Callable[[Messages, Sequence[Tool]], Messages] | None = None
    call_id: Callable[[str], str] | None = None


def first_open(text: str, markers: Sequence[str]) -> int:
    """Where the longest end of `text` begins that may still become one of the markers."""
    longest = max(map(len, markers), default=1) - 1
    for at in range(max(0, len(text) - longest), len(text)):
        if any(marker.startswith(text[at:]) for marker in markers):
            return at
    return len(text)


def earliest(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """The marker that comes first, and where; of several that begin there the longest."""
    found = [(at, -len(m), m) for m in markers if (at := text.find(m)) >= 0]
    return (min(found)[0], min(found)[2]) if found else None


def quoted(text: str) -> str:
    """`text` as a string of Lark."""
    return json.dumps(text)


def compact(value: Any) -> str:
    return well_formed(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def well_formed(text: str) -> str:
    """With U+FFFD for halves of surrogate pairs, which an escape in JSON can bring: no answer can
    hold them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def value_of(text: str) -> Any:
    """What a JSON text stands for; strings in it may hold raw line ends. Raises ValueError, also
    for NaN and for numbers without end, which are no JSON."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def json_rule(name: str, schema: Any) -> str:
    """A rule for JSON of this schema. Our options stand in place of the schema's own, which could
    switch checks off."""
    bound = {**schema, "x-guidance": JSON_OPTIONS} if isinstance(schema, Mapping) else schema
    return f"{name}: %json {json.dumps(bound)}"


def json_calls_grammar(
    tools: Sequence[Tool],
    many: bool,
    key: str,
    each: tuple[str, str] = ("", ""),
    around: tuple[str, str] = ("", ""),
    between: str = "\n",
) -> str:
    """Calls that are JSON objects with a name and `key`. each: texts around a call; around: around
    them all."""
    heads = [f'{each[0]}{{"name": {json.dumps(tool.name)}, "{key}": ' for tool in tools]
    return _calls_grammar(tools, many, heads, "}" + each[1], around, between)


def named_calls_grammar(
    tools: Sequence[Tool],
    many: bool,
    before: str,
    after: str,
    close: str = "",
    around: tuple[str, str] = ("", ""),
) -> str:
    """Calls that are JSON arguments behind their name, which stands between two texts."""
    heads = [f"{before}{tool.name}{after}" for tool in tools]
    return _calls_grammar(tools, many, heads, close, around, "\n" if close else "")


def _calls_grammar(
    tools: Sequence[Tool],
    many: bool,
    heads: Sequence[str],
    tail: str,
    around: tuple[str, str],
    between: str,
) -> str:
    more = ""
    if many:
        more = f"({quoted(between)} call)*" if between else "call*"
    parts = [quoted(around[0]), "call", more, quoted(around[1])]
    lines = ["start: " + " ".join(part for part in parts if part not in ("", '""'))]
    lines.append("call: " + " | ".join(f"c{i}" for i in range(len(tools))))
    for i, (tool, head) in enumerate(zip(tools, heads, strict=True)):
        end = f" {quoted(tail)}" if tail else ""
        lines += [f"c{i}: {quoted(head)} a{i}{end}", json_rule(f"a{i}", tool.schema)]
    return "\n".join(lines)
