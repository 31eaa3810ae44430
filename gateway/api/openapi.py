"""GET /openapi.json: the routes, and what they take and give, made once from records.

ROUTES is compared with the application's own routes by a test; it knows no handler.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct
from voltapile.gateway.api import bodies, codec

VERSION = "0.1.0"
REF = "#/components/schemas/{name}"


class Route(Struct, frozen=True):
    """also: other paths of the same. gives: required keys of the answer; () where it is no object.
    streams: the answer may be server-sent events. errors: beside those of all routes."""

    method: str
    path: str
    summary: str
    body: type[Struct] | None = None
    gives: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    streams: bool = False
    media: str = "application/json"
    errors: tuple[int, ...] = ()
    path_fields: tuple[str, ...] = ()
    query: tuple[str, ...] = ()
    is_open: bool = False  # no key is needed


CHAT = "/v1/chat/completions"
ROUTES = (
    Route("GET", "/v1/models", "The model that is served", gives=("object", "data"),
          also=("/models",)),
    Route("GET", "/v1/models/{id}", "The same by its name", gives=("id", "object"),
          also=("/models/{id}",), errors=(404,), path_fields=("id",)),
    Route("POST", CHAT, "Chat, as OpenAI", bodies.ChatBody, ("id", "choices", "usage"),
          ("/chat/completions",), True),
    Route("POST", "/v1/completions", "Completion, as OpenAI", bodies.CompletionBody,
          ("id", "choices", "usage"), ("/completions",), True),
    Route("POST", "/v1/responses", "Responses, as OpenAI", bodies.ResponsesBody,
          ("id", "object", "status", "output", "usage"), ("/responses",), True),
    Route("POST", "/v1/embeddings", "Embeddings, as OpenAI", bodies.EmbeddingsBody,
          ("object", "data", "usage"), ("/embeddings",)),
    Route("POST", "/v1/messages", "Messages, as Anthropic", bodies.MessagesBody,
          ("id", "type", "role", "content", "stop_reason", "usage"), (), True),
    Route("POST", "/v1/messages/count_tokens", "Tokens of a message, as Anthropic",
          bodies.MessagesBody, ("input_tokens",)),
    Route("POST", "/completion", "Completion, as llama-server", bodies.NativeBody, (), (), True),
    Route("POST", "/infill", "The gap between two texts, as llama-server", bodies.InfillBody,
          (), (), True),
    Route("POST", "/embedding", "Embeddings, as llama-server", bodies.EmbeddingBody),
    Route("POST", "/apply-template", "The prompt of a chat", bodies.ChatBody, ("prompt",)),
    Route("POST", "/tokenize", "A text as token ids", bodies.TokenizeBody, ("tokens",)),
    Route("POST", "/detokenize", "Token ids as a text", bodies.DetokenizeBody, ("content",)),
    Route("GET", "/props", "What is served, and its defaults",
          gives=("default_generation_settings", "total_slots", "chat_template")),
    Route("GET", "/slots", "What each slot does now", errors=(503,), query=("fail_on_no_slot",)),
    Route("GET", "/status", "Ranks, memory, and how far each request is",
          gives=("status", "ranks", "memory", "requests", "counters")),
    Route("GET", "/health", "Whether requests are taken", gives=("status",),
          also=("/v1/health",), errors=(503,), is_open=True),
    Route("GET", "/version", "Of the program", gives=("version",)),
    Route("GET", "/metrics", "Prometheus's text", media="text/plain"),
    Route("GET", "/", "The page for people", media="text/html", is_open=True),
    Route("GET", "/page/{name}", "A file of the page", media="*/*", errors=(404,),
          path_fields=("name",), is_open=True),
    Route("GET", "/openapi.json", "This document", gives=("openapi",), is_open=True),
)  # fmt: skip


async def openapi(request: web.Request) -> web.Response:
    return web.Response(body=_document(), content_type="application/json")


@cache
def _document() -> bytes:
    return codec.dumps(document())


def document() -> dict[str, Any]:
    records = [*dict.fromkeys(route.body for route in ROUTES if route.body)]
    refs, schemas = msgspec.json.schema_components(records, ref_template=REF)
    named = dict(zip(records, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        for path in (route.path, *route.also):
            operation = _operation(route, named.get(route.body) if route.body else None)
            paths.setdefault(path, {})[route.method.lower()] = operation
    error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Voltapile", "version": VERSION},
        "security": [{}, {"bearer": []}, {"header": []}],
        "paths": paths,
        "components": {"schemas": schemas | {"Error": error}, "securitySchemes": keys},
    }


def _operation(route: Route, body: dict[str, Any] | None) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": route.summary, "responses": _responses(route)}
    if route.is_open:
        operation["security"] = [{}]
    parameters = [_parameter(name, "path") for name in route.path_fields]
    parameters += [_parameter(name, "query") for name in route.query]
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        content = {"application/json": {"schema": body}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _responses(route: Route) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    if route.gives:
        schema = {"type": "object", "required": [*route.gives]}
    content: dict[str, Any] = {route.media: {"schema": schema}}
    if route.streams:
        event = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
        content["text/event-stream"] = {"schema": event}
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    failed = {"application/json": {"schema": {"$ref": REF.format(name="Error")}}}
    statuses = {*route.errors, 401, *((400, 413, 500, 503) if route.body else ())}
    for status in sorted(statuses):
        found = {} if route.path == "/health" else {"content": failed}
        responses[str(status)] = {"description": "An error"} | found
    return responses


def _parameter(name: str, where: str) -> dict[str, Any]:
    is_path = where == "path"
    return {"name": name, "in": where, "required": is_path, "schema": {"type": "string"}}
