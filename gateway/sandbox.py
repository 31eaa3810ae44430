"""The program that renders chat templates: a process of its own, so that no template can harm more.

Templates are strangers' programs: they run in Jinja's immutable sandbox, and the kernel bounds the
time and memory of this process, whatever one operation does. Requests come on descriptor 0, a
socket, and are answered there (renderer.py has the other end): a length and JSON, [source,
variables, seconds] -> [kind, text]. It imports as little as it can, to start soon and stay small.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import struct
from collections.abc import Generator, Mapping
from datetime import datetime
from types import FrameType, TracebackType
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEXT, ERROR, FULL = "text", "error", "full"  # kinds of answers; after FULL this process ends
LENGTH = struct.Struct("<I")
MAX_BYTES = 768 << 20  # of addresses: itself, the variables, and all that a template makes of them
# Whoever gets out of Jinja's sandbox finds no file, no socket and no other process.
LIMITS = {
    resource.RLIMIT_AS: MAX_BYTES,
    resource.RLIMIT_FSIZE: 0,
    resource.RLIMIT_NOFILE: 3,  # the standard ones, which are open
    resource.RLIMIT_NPROC: 0,  # root may all the same
    resource.RLIMIT_CORE: 0,
}
# It and Python import and open some things when they are first used: before the limits hold.
WARM_UP = r"""{{ '\N{EM DASH}' }}{{ ['<a>'] | pprint | wordwrap(9) | striptags }}{{ lipsum(1) }}
{{ strftime_now('%c %Z') }}
{{ no.more.now }}"""
MAX_LENGTH = 16 << 20  # characters of a rendered text
GRACE_SECONDS = 0.5  # for Python to raise an exception, before the kernel ends it
COMPILED = 8  # templates that are kept

FULL_TEXT = "it takes too much memory"


class _TooLongError(Exception):
    """A template has used up its time."""


class _RefusedError(jinja2.TemplateError):
    """The template itself refused, by raise_exception."""


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks training data; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own convention)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2 as chat templates expect it."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            cache_size=0,
        )
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        self.filters["tojson"] = _tojson
        self._templates: dict[str, jinja2.Template] = {}

    def answer(self, source: str, variables: Mapping[str, Any] | None) -> tuple[str, str]:
        """(kind, text); variables None: only see whether it compiles."""
        try:
            template = self._template(source)
            return TEXT, _text(template, variables) if variables is not None else ""
        except jinja2.TemplateSyntaxError as error:
            return ERROR, f"line {error.lineno}: {error.message}"
        except _RefusedError as error:
            return ERROR, str(error)
        except MemoryError as error:
            return FULL, _line(error.__traceback__) + FULL_TEXT
        except Exception as error:  # a template can raise whatever Python can
            return ERROR, _line(error.__traceback__) + (str(error) or type(error).__name__)

    def _template(self, source: str) -> jinja2.Template:
        template = self._templates.get(source)
        if template is None:
            if len(self._templates) >= COMPILED:
                self._templates.clear()
            template = self._templates[source] = self.from_string(source)
        return template


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started us
    signal.signal(signal.SIGVTALRM, _give_up)
    sandbox, kind = Sandbox(), TEXT
    assert sandbox.answer(WARM_UP, {}) == (ERROR, "line 3: 'no' is undefined")
    with socket.socket(fileno=0) as end, end.makefile("rb") as asked:
        for limit, value in LIMITS.items():
            resource.setrlimit(limit, (value, value))
        while kind != FULL and len(head := asked.read(LENGTH.size)) == LENGTH.size:
            kind, text = _answer(sandbox, asked.read(LENGTH.unpack(head)[0]))
            data = json.dumps([kind, text]).encode()
            end.sendall(LENGTH.pack(len(data)) + data)


def _answer(sandbox: Sandbox, request: bytes) -> tuple[str, str]:
    """One request, in bounded time of this process (a busy machine is not the template's fault)."""
    try:
        source, variables, seconds = json.loads(request)
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        signal.setitimer(signal.ITIMER_PROF, seconds + GRACE_SECONDS)  # SIGPROF ends the process
        return sandbox.answer(source, variables)
    except MemoryError:
        return FULL, FULL_TEXT
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _text(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    chunks, length = [], 0
    rendering = cast("Generator[str, None, None]", template.generate(variables))
    try:
        for chunk in rendering:
            length += len(chunk)
            if length > MAX_LENGTH:
                raise SecurityError(f"it makes more than {MAX_LENGTH} characters")
            chunks.append(chunk)
    except (SecurityError, _TooLongError) as error:
        rendering.throw(error)  # if it came between two chunks: to where the template stands
        raise
    return "".join(chunks)


def _line(traceback: TracebackType | None) -> str:
    """Where in the template an exception came from; Jinja has put its lines into the traceback."""
    line = 0
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f"line {line}: " if line else ""


def _give_up(number: int, frame: FrameType | None) -> NoReturn:
    raise _TooLongError("it takes too long")


def _raise(message: str) -> NoReturn:
    raise _RefusedError(message)


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
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


if __name__ == "__main__":
    main()
