"""voltapile chat: talk to a running server from the terminal, over /v1/chat/completions.

At a terminal each line is a turn; Ctrl-C stops an answer, /help lists commands, Ctrl-D ends.
Otherwise all of standard input is one message, and its answer goes to standard output. It is an
ordinary client and knows nothing of the server but its HTTP API.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

HELP = "Ctrl-C stops an answer, /reset forgets the conversation, Ctrl-D ends"
COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation",
    "/quit": "end, as Ctrl-D does",
}
SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # as the page takes them from /props

Message = dict[str, str]


class ChatError(ValueError):
    """A server that is not there or refuses; the text is for the person at the terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8080", type=base_url, metavar="URL",
        help="where the server listens")  # fmt: skip
    add("--api-key", default="", metavar="KEY", help="if the server asks for one")
    add("-m", "--model", default="", metavar="NAME", help="if the server has several")
    add("-sys", "--system", default="", metavar="TEXT", help="the system message")
    add("--temp", "--temperature", dest="temperature", type=float, metavar="X",
        help="0: the likeliest tokens; without it as the server says")  # fmt: skip
    add("--top-k", type=int, metavar="N", help="of so many likeliest tokens only")
    add("--top-p", type=float, metavar="X", help="of the likeliest that make up X")
    add("--min-p", type=float, metavar="X", help="of those so likely, the likeliest being 1")
    add("-s", "--seed", type=int, metavar="N", help="the same again gives the same answer")
    add("-n", "--max-tokens", type=int, metavar="N", help="end an answer after N tokens")


def base_url(text: str) -> str:
    """Also as people shorten it, or as OpenAI's clients are given it."""
    url = text if "://" in text else f"http://{text}"
    return url.rstrip("/").removesuffix("/v1")


def run(args: argparse.Namespace) -> int:
    if sys.stdin.isatty():
        return _converse(args)
    text = sys.stdin.read().strip()
    if not text:
        raise ChatError("standard input is empty: nothing to say")
    asyncio.run(_take_defaults(args))
    asyncio.run(_answer(args, [*_opening(args), {"role": "user", "content": text}]))
    return 0


def _converse(args: argparse.Namespace) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives input() a history and line editing)
    asyncio.run(_greet(args))
    asyncio.run(_take_defaults(args))
    messages = _opening(args)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print(f"\n{HELP}")
            continue
        text = line.strip()
        if text == "/quit":
            return 0
        if text == "/reset":
            messages = _opening(args)
            print("(forgotten)")
        elif line.startswith("/"):
            _explain(text)
        elif text:
            messages = _turn(args, [*messages, {"role": "user", "content": text}])


def _explain(text: str) -> None:
    """The list, for a command that is none."""
    if text != "/help":
        print(f"there is no command {text.split()[0]}; a blank before the / sends the line")
    for name, what in COMMANDS.items():
        print(f"{name:8} {what}")


def _turn(args: argparse.Namespace, messages: list[Message]) -> list[Message]:
    """The conversation after one answer; without the question, if that failed."""
    answer: list[str] = []
    try:
        asyncio.run(_answer(args, messages, answer))
    except KeyboardInterrupt:
        print(" (stopped)")
    except ChatError as error:
        print(f"voltapile: {error}", file=sys.stderr)
        return messages[:-1]
    return [*messages, {"role": "assistant", "content": "".join(answer)}]


def _opening(args: argparse.Namespace) -> list[Message]:
    return [{"role": "system", "content": args.system}] if args.system else []


async def _greet(args: argparse.Namespace) -> None:
    """Say which model answers, or find out now that none does."""
    async with _request(args, "GET", "/v1/models") as response:
        listed = await _object(response)
    names = [model["id"] for model in listed.get("data", []) if "id" in model]
    print(f"{', '.join(names) or 'a model'} at {args.url}. {HELP}.")


async def _take_defaults(args: argparse.Namespace) -> None:
    """What no option says, as a server with llama-server's /props says it; others have none."""
    try:
        async with _request(args, "GET", "/props") as response:
            told = (await _object(response)).get("default_generation_settings") or {}
        params = told.get("params") or {}
    except (ChatError, AttributeError):
        return
    for name in SAMPLING:
        if getattr(args, name) is None and isinstance(params.get(name), int | float):
            setattr(args, name, params[name])


async def _answer(
    args: argparse.Namespace, messages: list[Message], parts: list[str] | None = None
) -> None:
    """Print an answer as it comes, and keep it in `parts`, so that a part of it is kept too."""
    wanted = ("model", *SAMPLING, "seed", "max_tokens")
    options = {key: getattr(args, key) for key in wanted if getattr(args, key) not in (None, "")}
    body = {"messages": messages, "stream": True, **options}
    async with _request(args, "POST", "/v1/chat/completions", body) as response:
        async for event in _events(response):
            text = _text(event)
            print(text, end="", flush=True)
            if parts is not None:
                parts.append(text)
    print()


@contextlib.asynccontextmanager
async def _request(
    args: argparse.Namespace, method: str, path: str, body: Any = None
) -> AsyncIterator[aiohttp.ClientResponse]:
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    # No limit in all: a long answer takes long. A server that says nothing sends comments.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.request(method, args.url + path, json=body) as response,
        ):
            if response.status != 200:
                raise ChatError(await _refusal(response))
            yield response
    except aiohttp.InvalidURL as error:
        raise ChatError(f"{args.url!r} is not a URL") from error
    except aiohttp.ClientConnectorError as error:
        raise ChatError(
            f"no server answers at {args.url}; start one with: voltapile serve -m FILE"
        ) from error
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise ChatError(f"lost the server at {args.url}: {reason}") from error


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The data of server-sent events up to [DONE]."""
    async for raw in response.content:
        line = raw.decode("utf-8", "replace").strip()
        if not line.startswith("data:"):
            continue  # a comment that keeps the connection open, or a blank line
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield _parsed(data)
    raise ChatError("the server ended the answer before it was complete")


def _text(event: dict[str, Any]) -> str:
    if "error" in event:
        raise ChatError(f"the server failed: {_message(event)}")
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return str(delta.get("reasoning_content") or "") + str(delta.get("content") or "")


async def _refusal(response: aiohttp.ClientResponse) -> str:
    body = await response.text()
    try:
        reason = _message(_parsed(body))
    except ChatError:
        reason = body[:200]
    if response.status == 503:
        return f"the server is not ready: {reason}"
    return f"the server refused ({response.status}): {reason}"


def _message(body: dict[str, Any]) -> str:
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)


async def _object(response: aiohttp.ClientResponse) -> dict[str, Any]:
    return _parsed(await response.text())


def _parsed(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ChatError(f"not an answer of a Voltapile or OpenAI server: {text[:100]!r}")
    return value
