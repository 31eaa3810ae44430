"""Jinja2 as chat templates expect it, with bounds on what a template may cost.

Bounded: CPU time (looked at in every loop iteration and call), the length of the output and of
every value that an operator, a call, `join` or `replace` makes, numbers, paddings. Not bounded:
one single operation on values within those lengths, such as sorting a long list or writing out
lists that hold each other many times over. So a file made to do harm can still cost some seconds
and memory; the users' messages, which are data here, cannot.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import partial
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 4.0  # of the rendering thread's own CPU time: a busy machine is not the template
MAX_LENGTH = 16 << 20  # characters or items
MAX_NUMBER = 1 << 256

# They make much from little, and no chat template needs them.
_NO_FILTERS = ("batch", "center", "format", "indent", "slice", "urlize", "wordwrap", "xmlattr")
_NO_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
_WIDE_FORMAT = re.compile(r"\d{4}|\*|\{[^{}]*\{")  # a width in the thousands, or one from outside

_deadline: ContextVar[float] = ContextVar("_deadline")


class TemplateError(ValueError):
    """A template that cannot be read, or that fails on these messages; the text says why."""


class _Raised(jinja2.TemplateError):
    """The template itself refused, by raise_exception."""


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks training data; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own convention)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounds(NodeTransformer):
    """Puts a call into every loop, and makes `~` a call, so that `call` sees them."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("chat_tick", [])))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("chat_concat", node.nodes)


def _call(name: str, args: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one or more templates."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            optimized=False,  # it would compute constants without bounds
        )
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        self.filters |= {"tojson": _tojson, "join": _join_filter, "replace": _replace}
        for name in _NO_FILTERS:
            del self.filters[name]
        self.chat_tick = _nothing
        self.chat_concat = _concat

    def compile_chat(self, source: str) -> Callable[..., str]:
        """The template as a function: (variables, seconds=MAX_SECONDS) -> text."""
        try:
            tree = _Bounds().visit(self.parse(source)).set_environment(self)
            return partial(_render, self.from_string(tree))
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno}: {error.message}") from error
        except Exception as error:  # such as nesting beyond what Python compiles
            raise TemplateError(f"it cannot be compiled: {error}") from error

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if time.thread_time() > _deadline.get():
            raise SecurityError("it takes too long")
        return _bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if hasattr(value, "__len__") and isinstance(times, int):
                    _check_length(len(value) * times)
        elif operator == "**" and not (abs(left) < MAX_NUMBER and abs(right) <= 256):
            raise SecurityError("a power is too large")
        return _bounded(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja asks for every attribute that a template reads; here the methods of str that
        could make too much are replaced by bounded ones, or refused."""
        text = getattr(value, "__self__", None)
        if isinstance(value, BuiltinMethodType) and isinstance(text, str):
            if value.__name__ in _NO_METHODS:
                raise SecurityError(f"the method {value.__name__} is not available")
            if value.__name__ in ("format", "format_map"):
                _check_format(text)
            elif value.__name__ in ("join", "replace"):
                return partial(_join if value.__name__ == "join" else _replace, text)
        return super().wrap_str_format(value)


def _render(
    template: jinja2.Template, variables: Mapping[str, Any], seconds: float = MAX_SECONDS
) -> str:
    token = _deadline.set(time.thread_time() + seconds)
    try:
        chunks, length = [], 0
        for chunk in template.generate(variables):
            length += len(chunk)
            _check_length(length)
            chunks.append(chunk)
        return "".join(chunks)
    except _Raised as error:
        raise TemplateError(str(error)) from error
    except Exception as error:  # a template can raise whatever Python can
        raise TemplateError(str(error) or type(error).__name__) from error
    finally:
        _deadline.reset(token)


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise SecurityError(f"it makes more than {MAX_LENGTH} characters or items")


def _bounded(value: Any) -> Any:
    if isinstance(value, int):
        if not -MAX_NUMBER < value < MAX_NUMBER:
            raise SecurityError("a number is too large")
    elif isinstance(value, str | list | tuple | dict):
        _check_length(len(value))
    return value


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise SecurityError("a format has a width that is too large or not a constant")


def _nothing() -> None:
    """What loops call; Sandbox.call looks at the clock."""


def _concat(*values: Any) -> str:
    return _join("", values)


def _join(separator: str, values: Iterable[Any]) -> str:
    texts = [str(value) for value in values]
    _check_length(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


@jinja2.pass_environment
def _join_filter(
    environment: jinja2.Environment,
    values: Iterable[Any],
    d: str = "",
    attribute: str | int | None = None,
) -> str:
    if attribute is not None:
        values = [environment.getitem(value, attribute) for value in values]
    return _join(str(d), values)


def _replace(value: Any, old: str, new: str, count: int | None = -1) -> str:
    text = str(value)
    _check_length(len(text) + text.count(str(old)) * len(str(new)))
    return text.replace(str(old), str(new), -1 if count is None else count)


def _raise(message: str) -> None:
    raise _Raised(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes it for HTML."""
    if indent is not None and indent > 16:
        raise SecurityError("tojson: the indent is too large")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
