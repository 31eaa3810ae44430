"""Mixed requests for minutes or hours: does a server's memory stay what it was, and is it there?

    python bench/soak.py -m model.gguf [-t 1] [--tokens 2000] [--minutes 6] [--clients 4]

Streams, cancelled ones, schemas, forced calls, several choices with log-probabilities, echo,
Anthropic's messages, embeddings, wrong fields and prompts near the end of the context, at random.
Each minute: requests so far, resident megabytes (own + mapped) of the gateway and of its children,
and its open files. A tiny model makes a thousand requests a minute. Exit status 1: an answer was
a 500 or more.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
from http_stream import serving

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
CHAT = "/v1/chat/completions"
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def words(count: int) -> str:
    return " ".join(random.choices(WORDS, k=count))


def schema() -> dict[str, Any]:
    """A new one nearly each time, so that they are compiled and dropped."""
    text = {"type": "string", "maxLength": random.randint(1, 20)}
    wanted = {"type": "object", "properties": {f"k{random.randrange(100)}": text}}
    named = {"name": "x", "strict": True, "schema": wanted | {"additionalProperties": False}}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def request(kind: str) -> tuple[str, dict[str, Any]]:
    """(path, body)"""
    text, limit = words(random.randint(1, 60)), {"max_tokens": random.randint(1, 40)}
    chat = {"messages": [{"role": "user", "content": text}], "temperature": 1} | limit
    match kind:
        case "plain":
            return CHAT, chat
        case "stream" | "cancel":
            return CHAT, chat | {"stream": True}
        case "schema":
            return CHAT, chat | schema()
        case "choices":
            return CHAT, chat | {"n": 3, "logprobs": True, "top_logprobs": 5}
        case "wrong":
            return CHAT, chat | {"max_tokens": random.choice([-1, "5", 0, 1e9, [1]])}
        case "call":
            tools = [{"type": "function", "function": FUNCTION}]
            return CHAT, chat | {"tools": tools, "tool_choice": "required"}
        case "long":
            return CHAT, chat | {
                "messages": [{"role": "user", "content": words(random.randint(100, 2000))}]
            }
        case "echo":
            return "/v1/completions", {"prompt": text, "logprobs": 3, "echo": True} | limit
        case "anthropic":
            body = {"model": "x", "messages": chat["messages"], "stream": True}
            return "/v1/messages", body | limit
        case "embed":
            return "/v1/embeddings", {"input": text}
    return "/tokenize", {"content": text * 50}


KINDS = (
    *("plain", "stream", "cancel", "schema", "choices", "wrong"),
    *("call", "long", "echo", "anthropic", "embed", "tokens"),
)


async def client(url: str, until: float, seen: Counter[str]) -> None:
    patience = aiohttp.ClientTimeout(total=None)
    while time.monotonic() < until:
        async with aiohttp.ClientSession(timeout=patience) as session:
            for _ in range(random.randint(1, 20)):
                kind = random.choice(KINDS)
                path, body = request(kind)
                async with session.post(url + path, json=body) as response:
                    seen[f"{response.status}"] += 1
                    if kind == "cancel":
                        await asyncio.sleep(random.random() * 0.3)
                        response.close()
                    else:
                        await response.read()


def resident(pid: int) -> str:
    lines = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    own, mapped = (int(lines[name].split()[0]) >> 10 for name in ("RssAnon", "RssFile"))
    return f"{own} + {mapped}"


async def watch(gateway: int, until: float, seen: Counter[str]) -> None:
    while True:
        children = Path(f"/proc/{gateway}/task/{gateway}/children").read_text().split()
        sizes = ", ".join(resident(pid) for pid in [gateway, *map(int, children)])
        files = len(list(Path(f"/proc/{gateway}/fd").iterdir()))
        print(f"{sum(seen.values())} requests: {sizes} MB; {files} files", flush=True)
        if time.monotonic() > until:
            return
        await asyncio.sleep(60)


async def soak(url: str, gateway: int, args: argparse.Namespace) -> Counter[str]:
    until, seen = time.monotonic() + 60 * args.minutes, Counter[str]()
    clients = [client(url, until, seen) for _ in range(args.clients)]
    await asyncio.gather(watch(gateway, until, seen), *clients)
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-t", "--threads", default="1")
    parser.add_argument("--tokens", type=int, default=2000, help="of the context, about")
    parser.add_argument("--interval", default="", help="--stream-interval-ms of the server")
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--clients", type=int, default=4)
    args = parser.parse_args()
    with serving(args) as (url, gateway):
        seen = asyncio.run(soak(url, gateway, args))
    print(dict(seen))
    return int(any(status.startswith("5") for status in seen))


if __name__ == "__main__":
    sys.exit(main())
