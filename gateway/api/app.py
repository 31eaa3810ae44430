"""The aiohttp application: routes, middlewares, and the listener that serves it.

It owns what lives as long as the application (the watch on the event loop) and stops open streams
at shutdown. The engine is given; whoever made it closes it after the listener.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
from collections.abc import AsyncIterator, Iterable

from aiohttp import web
from aiohttp.typedefs import Handler
from voltapile.gateway.api.chat import chat_completions
from voltapile.gateway.api.completions import completions
from voltapile.gateway.api.connections import Connections
from voltapile.gateway.api.embeddings import embedding, embeddings
from voltapile.gateway.api.errors import ApiError, error_middleware
from voltapile.gateway.api.health import health, metrics_text, version
from voltapile.gateway.api.infill import infill
from voltapile.gateway.api.messages import count_tokens, messages
from voltapile.gateway.api.models import get_model, list_models
from voltapile.gateway.api.native import completion
from voltapile.gateway.api.openapi import openapi
from voltapile.gateway.api.options import NO_DEFAULTS, Defaults
from voltapile.gateway.api.page import PREFIX, add_page
from voltapile.gateway.api.props import apply_template, props, slots
from voltapile.gateway.api.responses import responses
from voltapile.gateway.api.services import SERVICES, Services, given_key
from voltapile.gateway.api.status import status
from voltapile.gateway.api.tokenize import detokenize, tokenize
from voltapile.gateway.engine import Engine
from voltapile.gateway.grammar import Grammars
from voltapile.gateway.metrics import Metrics
from voltapile.gateway.template import ChatTemplate
from voltapile.gateway.tokenizer import Tokenizer
from voltapile.topology.plan import Plan

MAX_BODY_BYTES = 32 << 20
SHUTDOWN_SECONDS = 2.0  # open connections have so long after their streams were stopped
OPEN_PATHS = ("/health", "/v1/health", "/openapi.json", "/")  # no key needed


def make_app(
    engine: Engine,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    plan: Plan,
    *,
    api_keys: Iterable[str] = (),
    defaults: Defaults = NO_DEFAULTS,
    metrics: bool = True,
    webui: bool = True,
    max_body_bytes: int = MAX_BODY_BYTES,
    keepalive_seconds: float = 15.0,
    write_seconds: float = 60.0,
) -> web.Application:
    """The application. defaults: of requests. metrics, webui: whether /metrics and the page at /
    exist."""
    app = web.Application(
        middlewares=[_observe, error_middleware, _allow_origins, _authorise],
        client_max_size=max_body_bytes,
    )
    app[SERVICES] = Services(
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        plan=plan,
        grammars=Grammars(tokenizer),
        metrics=Metrics(engine.stats, lambda: engine.memory),
        defaults=defaults,
        api_keys=tuple(api_keys),
        keepalive_seconds=keepalive_seconds,
        write_seconds=write_seconds,
    )
    _add_routes(app, metrics)
    if webui:
        add_page(app)
    app.on_response_prepare.append(_common_headers)
    app.on_shutdown.append(_interrupt_generations)
    app.cleanup_ctx.append(_loop_watch)
    return app


@contextlib.asynccontextmanager
async def listening(
    app: web.Application, host: str = "127.0.0.1", port: int = 8080
) -> AsyncIterator[str]:
    """Serves `app` inside the block; yields its URL (port 0: one that is free)."""
    inner = web.AppRunner(app)
    await inner.setup()
    assert inner.server is not None
    runner = _Runner(app, Connections(inner.server))
    try:
        await runner.setup()
        await _listen(runner, host, port)
        name = f"[{host}]" if ":" in host else host
        yield f"http://{name}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        await inner.cleanup()


async def _listen(runner: web.ServerRunner, host: str, port: int) -> None:
    """Raises OSError, which names the address."""
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"{host}:{port} is in use; --port takes another, 0 a free one"
            raise OSError(message) from None
        raise OSError(f"cannot listen at {host}:{port}: {error.strerror or error}") from None


async def run(app: web.Application, host: str, port: int, stop: asyncio.Event) -> None:
    """Serves `app` until `stop` is set."""
    async with listening(app, host, port):
        await stop.wait()


class _Runner(web.ServerRunner):
    """Ends an application's streams once nobody new can come, and waits for their connections."""

    def __init__(self, app: web.Application, connections: Connections) -> None:
        super().__init__(connections, shutdown_timeout=SHUTDOWN_SECONDS)
        self._app = app

    async def shutdown(self) -> None:
        await self._app.shutdown()


def _add_routes(app: web.Application, with_metrics: bool) -> None:
    route = app.router
    for prefix in ("/v1", ""):  # llama-server answers both
        route.add_get(f"{prefix}/models", list_models)
        route.add_get(prefix + "/models/{id:.+}", get_model)
        route.add_post(f"{prefix}/chat/completions", chat_completions)
        route.add_post(f"{prefix}/completions", completions)
        route.add_post(f"{prefix}/responses", responses)
        route.add_post(f"{prefix}/embeddings", embeddings)
        route.add_get(f"{prefix}/health", health)
    route.add_post("/v1/messages", messages)
    route.add_post("/v1/messages/count_tokens", count_tokens)
    route.add_post("/completion", completion)
    route.add_post("/infill", infill)
    route.add_post("/embedding", embedding)
    route.add_get("/openapi.json", openapi)
    route.add_get("/version", version)
    route.add_get("/props", props)
    route.add_get("/slots", slots)
    route.add_get("/status", status)
    route.add_post("/apply-template", apply_template)
    route.add_post("/tokenize", tokenize)
    route.add_post("/detokenize", detokenize)
    if with_metrics:
        route.add_get("/metrics", metrics_text)


@web.middleware
async def _observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts answers by route and status."""
    resource = request.match_info.route.resource
    endpoint = resource.canonical if resource is not None else "unknown"
    count = request.app[SERVICES].metrics.request_done
    try:
        response = await handler(request)
    except asyncio.CancelledError:
        count(endpoint, 499)
        raise
    count(endpoint, response.status)
    return response


@web.middleware
async def _allow_origins(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A browser's question before a request from another origin: any path, no key."""
    if request.method != "OPTIONS":
        return await handler(request)
    asked = request.headers.get("Access-Control-Request-Headers", "Authorization, Content-Type")
    headers = {
        "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
        "Access-Control-Allow-Headers": asked,
        "Access-Control-Max-Age": "86400",
    }
    return web.Response(status=204, headers=headers)


@web.middleware
async def _authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A key, where keys were given; compared in constant time."""
    keys = request.app[SERVICES].api_keys
    path = request.path
    if not keys or path in OPEN_PATHS or path.startswith(PREFIX):
        return await handler(request)
    given = given_key(request)
    secret = (given or "").encode("utf-8", "surrogateescape")
    matches = [hmac.compare_digest(secret, key.encode()) for key in keys]
    if not any(matches):
        needed = "an API key is needed: Bearer in Authorization, or X-Api-Key"
        what = needed if given is None else "the API key is not valid"
        challenge = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, what, code="invalid_api_key", headers=challenge)
    return await handler(request)


async def _common_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "voltapile"
    response.headers["Access-Control-Allow-Origin"] = "*"


async def _interrupt_generations(app: web.Application) -> None:
    """Open streams end with an error that says so, instead of a cut connection."""
    for generation in list(app[SERVICES].live):
        generation.interrupt()


async def _loop_watch(app: web.Application) -> AsyncIterator[None]:
    task = asyncio.create_task(app[SERVICES].metrics.watch_loop())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
