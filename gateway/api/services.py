"""Services: what every handler needs, under one typed key of the application.

It makes nothing and owns nothing; app.py fills it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from aiohttp import web
from voltapile.gateway.api.errors import ApiError
from voltapile.gateway.api.options import Defaults
from voltapile.gateway.engine import Engine
from voltapile.gateway.grammar import Grammars
from voltapile.gateway.metrics import Metrics
from voltapile.gateway.template import ChatTemplate
from voltapile.gateway.tokenizer import Tokenizer
from voltapile.topology.plan import Plan

if TYPE_CHECKING:
    from voltapile.gateway.api.generate import Generation

P = ParamSpec("P")
R = TypeVar("R")

BODY_SECONDS = 300.0
OFF_LOOP_BYTES = 16 << 10  # input from which parsing, rendering and tokenising leave the event loop


@dataclass(frozen=True, kw_only=True)
class Services:
    """template None: the model has no chat template."""

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate | None
    plan: Plan
    metrics: Metrics
    grammars: Grammars
    defaults: Defaults = field(default_factory=dict)  # of fields that a request does not name
    api_keys: tuple[str, ...] = ()
    keepalive_seconds: float = 15.0  # an SSE comment after so long without an event
    write_seconds: float = 60.0  # a client that takes nothing for so long is gone
    started: int = field(default_factory=lambda: int(time.time()))
    live: set[Generation] = field(default_factory=set)  # interrupted at shutdown


SERVICES = web.AppKey("services", Services)


def given_key(request: web.Request) -> str | None:
    """The key of OpenAI's or Anthropic's header; "" for another scheme, None for nothing."""
    header = request.headers.get("Authorization")
    scheme, _, key = (header or "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    # Another scheme is for a proxy between us.
    return request.headers.get("X-Api-Key", None if header is None else "")


def client_of(request: web.Request) -> str:
    """Who asks, as clients take turns: a key may be shared, and so may an address."""
    has_keys = bool(request.app[SERVICES].api_keys)
    key = hash(given_key(request)) if has_keys else 0  # no secret leaves here
    return f"{request.remote or ''} {key}"


async def read_body(request: web.Request) -> bytes:
    """The whole body. A client that is slower than BODY_SECONDS gets a 408."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError as error:
        message = f"the body did not arrive within {BODY_SECONDS:g} s"
        raise ApiError(408, message, code="request_timeout") from error


async def off_loop(size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`function(*args)`, in a thread when `size` bytes of input would hold up the event loop."""
    if size < OFF_LOOP_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)
