"""Every error as OpenAI's body: {"error": {"message", "type", "param", "code"}}.

Anthropic's paths have Anthropic's. ApiError is what handlers raise; the middleware turns it, and
whatever else escapes, into a response. It knows nothing of the engine except that it may refuse or
be unavailable.
"""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from voltapile.gateway.api import codec
from voltapile.gateway.engine import EngineUnavailable
from voltapile.gateway.request import Refused

log = logging.getLogger(__name__)

ANTHROPIC_PATH = "/v1/messages"  # this one, and what lies below it
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

# Beginnings of paths that other servers have, and why they are not here.
NOT_HERE = {
    **dict.fromkeys(
        ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking", "/v2/rerank", "/score",
         "/v1/score"),
        "no model that can be served here ranks documents",
    ),
    "/slots/": "slots are not saved, restored nor erased: what was computed is found by content",
    "/lora-adapters": "adapters (LoRA) are not supported",
}  # fmt: skip

CLIENT_LEFT = 499  # nginx's status for a client that closed the connection


class ApiError(Exception):
    """An answer that is not a success. kind: OpenAI's error type."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def anthropic_body(self) -> dict[str, Any]:
        usual = "invalid_request_error" if self.status < 500 else "api_error"
        kind = ANTHROPIC_KINDS.get(self.status, usual)
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str = "") -> web.Response:
        """path: of the request; some have a body of their own."""
        is_anthropic = path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")
        body = self.anthropic_body() if is_anthropic else self.body()
        return json_response(body, status=self.status, headers=self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The caller's fault."""
    return ApiError(400, message, param=param, code=code)


def engine_error(message: str) -> ApiError:
    """The engine's fault: a generation that it could not finish."""
    return ApiError(500, message, kind="server_error", code="engine_error")


def unavailable(message: str, retry_after: int = 5) -> ApiError:
    """No engine at the moment; the client may come back after so many seconds."""
    headers = {"Retry-After": str(retry_after)}
    return ApiError(503, message, kind="service_unavailable", code="unavailable", headers=headers)


def json_response(
    value: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """A response with `value` as its JSON body."""
    return web.Response(
        body=codec.dumps(value), status=status, headers=headers, content_type="application/json"
    )


def from_exception(error: Exception) -> ApiError:
    """The answer to an exception that left a handler or broke a stream."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Refused):
        return bad_request(str(error), error.param, error.code)
    if isinstance(error, EngineUnavailable):
        return unavailable(str(error) or "the engine is not available", error.retry_after)
    if isinstance(error, web.HTTPException):
        return _from_http(error)
    if isinstance(error, web.RequestPayloadError):
        why = " ".join(str(error).split()).removeprefix("400, message: ")
        return bad_request(f"the request body cannot be read: {why}")
    log.error("a handler failed", exc_info=error)
    return ApiError(500, "internal error", kind="server_error", code="internal_error")


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers with OpenAI's body whatever goes wrong below."""
    try:
        return await handler(request)
    except ConnectionError:
        return web.Response(status=CLIENT_LEFT)  # nobody will read it
    except Exception as error:
        answer = from_exception(error)
        if isinstance(error, web.HTTPNotFound):
            answer = _not_found(request.path)
        if answer.status >= 500 and answer.status != 501:
            log.warning("%s %s: %d %s", request.method, request.path, answer.status, answer)
        return answer.response(request.path)


def _not_found(path: str) -> ApiError:
    """What another server would have there is told apart from what is only written wrong."""
    for other, why in NOT_HERE.items():
        if path == other or (other.endswith("/") and path.startswith(other)):
            return ApiError(501, why, kind="not_supported_error", code="not_supported")
    return ApiError(404, f"unknown path {path:.200}: /openapi.json has all", code="not_found")


def _from_http(error: web.HTTPException) -> ApiError:
    """aiohttp's own exceptions: unknown path, wrong method, body too large."""
    if isinstance(error, web.HTTPNotFound):
        return ApiError(404, "unknown path", code="not_found")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"method {error.method} is not allowed here; allowed: {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, error.text or "the body is too large", code="request_too_large")
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return ApiError(error.status, error.reason, kind=kind)
