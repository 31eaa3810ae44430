"""What llama-server's command lines say beyond our own options: defaults of sampling, a template,
and options that change nothing here, of which the log tells.

docs/operations.md compares the two programs option by option.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from voltapile.gateway.cli.parser import UsageError

log = logging.getLogger("voltapile")

# Options that take nothing, one word, or perhaps one; and why each has no effect.
ALWAYS: tuple[tuple[tuple[str, ...], int | str | None, str], ...] = (
    (("--jinja",), 0, "chat templates are always Jinja's"),
    (("-fa", "--flash-attn"), "?", "attention never stores its scores, whatever is said"),
    (("--mlock",), 0, "the file stays mapped, and pages of it may go; --no-mmap copies it"),
    (("--mmap",), 0, "the file is mapped unless --no-mmap is given"),
    (("--warmup", "--no-warmup"), 0, "no run is needed to warm up"),
    (("--embeddings", "--embedding"), 0, "/v1/embeddings is always there, beside all other routes"),
    (("-tb", "--threads-batch"), None, "prompts are read by the threads of -t"),
    (("--threads-http",), None, "one event loop serves all connections"),
    (("--slots",), 0, "/slots is always there"),
    (("-cb", "--cont-batching"), 0, "requests always join a running batch"),
    (("--no-context-shift",), 0, "nothing is ever cut from a context"),
    (("-kvu", "--kv-unified"), 0, "all requests share one pool of pages"),
    (("--cache-prompt",), 0, "prompts are cached unless a request says cache_prompt: false"),
    (("-sps", "--slot-prompt-similarity"), None, "pages are shared by content, not by slot"),
    (("-dt", "--defrag-thold"), None, "pages need no defragmentation"),
    (("--numa",), None, "threads and memory always keep to the node of their rank"),
    (("-to", "--timeout"), None, "a client that reads nothing for 60 s is dropped, and no other"),
    (("--offline",), 0, "nothing is fetched but by -m demo"),
    (("--log-colors",), "?", "the log has no colours"),
    (("--log-prefix", "--log-timestamps"), 0, "log lines always have a time"),
    (("-lv", "--verbosity", "--log-verbosity"), None, "there are two levels: -v logs more"),
)  # fmt: skip
# Field of a request -> option, type, what it is.
SAMPLING: dict[str, tuple[tuple[str, ...], type, str]] = {
    "temperature": (("--temp", "--temperature"), float, "0: the likeliest token"),
    "top_k": (("--top-k",), int, "of so many likeliest tokens; 0: all"),
    "top_p": (("--top-p",), float, "of the likeliest that make up so much"),
    "min_p": (("--min-p",), float, "of those at least so likely, the likeliest being 1"),
    "repeat_penalty": (("--repeat-penalty",), float, "1: none"),
    "presence_penalty": (("--presence-penalty",), float, "0: none"),
    "frequency_penalty": (("--frequency-penalty",), float, "0: none"),
    "repeat_last_n": (("--repeat-last-n",), int, "the penalties' window; -1: all"),
    "seed": (("-s", "--seed"), int, "-1: a random one for each request"),
}


class _NoEffect(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        namespace.no_effect = {**namespace.no_effect, option: self.help}


def add_without_effect(parser: argparse.ArgumentParser) -> None:
    """Those that llama-server's command lines have, and that are always so here."""
    group = parser.add_argument_group("llama-server's options that change nothing here")
    parser.set_defaults(no_effect={})
    for names, nargs, reason in ALWAYS:
        given: dict[str, Any] = {"nargs": nargs} if nargs == 0 else {"nargs": nargs, "metavar": "X"}
        group.add_argument(
            *names, action=_NoEffect, help=reason, default=argparse.SUPPRESS, **given
        )


def tell_without_effect(args: argparse.Namespace) -> None:
    """A line of the log for each that was given."""
    for option, reason in getattr(args, "no_effect", {}).items():
        log.info("%s has no effect: %s", option, reason)


def add_request_defaults(parser: argparse.ArgumentParser) -> None:
    """What a request takes that does not say it itself."""
    group = parser.add_argument_group("defaults of requests")
    for field, (names, kind, what) in SAMPLING.items():
        metavar = "N" if kind is int else "X"
        group.add_argument(*names, dest=field, type=kind, metavar=metavar, help=what)
    group.add_argument("--reasoning-format", choices=("auto", "deepseek", "none"),
        help="none: reasoning stays in the content")  # fmt: skip
    group.add_argument("--reasoning-budget", type=int, metavar="N",
        help="most tokens of reasoning; 0: none, -1: any number")  # fmt: skip
    group.add_argument("--chat-template-kwargs", type=json_object, metavar="JSON",
        help="arguments of the chat template")  # fmt: skip
    group.add_argument("--chat-template", default="", metavar="TEXT",
        help="a Jinja template instead of the file's, or chatml")  # fmt: skip
    group.add_argument("--chat-template-file", type=Path, metavar="FILE",
        help="the same, in a file")  # fmt: skip


def json_object(text: str) -> dict[str, Any]:
    """Raises ValueError."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def request_defaults(args: argparse.Namespace) -> dict[str, Any]:
    """The fields that the options set. Raises UsageError for a value that no request may have."""
    from voltapile.gateway.api.errors import ApiError
    from voltapile.gateway.api.schema import chat_request

    names: Sequence[str] = (*SAMPLING, "reasoning_format", "reasoning_budget",
                            "chat_template_kwargs")  # fmt: skip
    given = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    try:
        asked = {"messages": [{"role": "user", "content": ""}], **given}
        chat_request(json.dumps(asked).encode(), 1)
    except ApiError as error:
        raise UsageError(f"a default of requests is wrong: {error}") from None
    return given


def template_source(args: argparse.Namespace) -> str:
    """The template to take instead of the file's; "" for the file's. Raises OSError, UsageError."""
    from voltapile.gateway.template import CHATML

    if args.chat_template and args.chat_template_file:
        raise UsageError("--chat-template and --chat-template-file contradict each other")
    if args.chat_template_file:
        return str(args.chat_template_file.read_text())
    text = str(args.chat_template)
    if text == "chatml":
        return CHATML
    if text and "{" not in text:
        raise UsageError(
            f"--chat-template {text}: neither a Jinja template nor chatml, the one that has a "
            "name here; --chat-template-file reads one from a file"
        )
    return text
