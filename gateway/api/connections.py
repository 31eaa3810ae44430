"""Connections: aiohttp's low-level server, with our error body for what never becomes a request.

A junk request line, headers that are too long or a bad chunk are answered by the protocol itself,
below all routes and middlewares. It serves an application's handler and knows no endpoint.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from voltapile.gateway.api.errors import ApiError, from_exception


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whatever speaks no HTTP (scanners, TLS to this port) would fill the log with tracebacks."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


log = logging.getLogger(__name__)
log.addFilter(_is_worth_a_line)
_LOGS: dict[str, Any] = {"logger": log, "access_log": None}


class Connections(web.Server):
    """The connections of one application; `inner`: the server that its AppRunner has made."""

    def __init__(self, inner: web.Server) -> None:
        super().__init__(
            self._answered,
            request_factory=inner.request_factory,
            handler_cancellation=True,
            **_LOGS,
        )
        self._inner = inner

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=asyncio.get_running_loop(), **_LOGS)

    async def _answered(self, request: web.BaseRequest) -> web.StreamResponse:
        """Some of aiohttp's refusals (Expect) come before any middleware."""
        try:
            return await self._inner.request_handler(request)
        except web.HTTPException as error:
            return from_exception(error).response(request.path)


class _Connection(web.RequestHandler):
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """status 400: what came is no HTTP. Otherwise something has escaped the middlewares."""
        if status >= 500:
            log.error("no answer from a handler", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of another answer has been sent")
        response = _error(status, message).response()
        response.headers["Server"] = "voltapile"
        response.force_close()
        return response


def _error(status: int, message: str | None) -> ApiError:
    if status >= 500:
        return ApiError(status, "internal error", kind="server_error", code="internal_error")
    first = (message or "").strip().partition("\n")[0].rstrip(" :")
    if "content-encoding" in first and "install" in first:  # what aiohttp says of br and zstd
        text = "a body may be compressed with gzip or deflate only"
        return ApiError(415, text, code="unsupported_encoding")
    text = f"this is not HTTP as it should be: {first}" if first else "this is not HTTP"
    return ApiError(status, text, code="bad_http")
