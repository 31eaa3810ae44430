import logging

import pytest
from aiohttp import web
from voltapile.gateway.api.errors import (
    ApiError,
    bad_request,
    engine_error,
    error_middleware,
    from_exception,
)
from voltapile.gateway.engine import EngineUnavailable
from voltapile.gateway.request import Refused


def test_the_body_is_openais():
    error = bad_request("no", "stop", "invalid_type")
    assert error.body() == {
        "error": {
            "message": "no",
            "type": "invalid_request_error",
            "param": "stop",
            "code": "invalid_type",
        }
    }
    assert error.response().content_type == "application/json"


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (ApiError(418, "tea"), 418, "invalid_request_error", None),
        (engine_error("rank 0 died"), 500, "server_error", "engine_error"),
        (Refused("long", "context_length_exceeded"), 400, "invalid_request_error", None),
        (EngineUnavailable("loading", 9), 503, "service_unavailable", "unavailable"),
        (web.HTTPNotFound(), 404, "invalid_request_error", "not_found"),
        (web.HTTPMethodNotAllowed("PUT", ["GET"]), 405, "invalid_request_error", None),
        (web.HTTPRequestEntityTooLarge(1, 2), 413, "invalid_request_error", "request_too_large"),
        (web.HTTPUnsupportedMediaType(), 415, "invalid_request_error", None),
        (ValueError("secret path"), 500, "server_error", "internal_error"),
    ],
)
def test_every_exception_has_an_answer(error, status, kind, code):
    answer = from_exception(error)
    assert (answer.status, answer.kind) == (status, kind)
    assert code is None or answer.code == code
    assert "secret" not in answer.message


def test_an_unavailable_engine_says_when_to_come_back():
    assert from_exception(EngineUnavailable("loading", 9)).headers == {"Retry-After": "9"}


def test_only_surprises_are_logged(caplog):
    with caplog.at_level(logging.ERROR):
        from_exception(bad_request("no"))
        assert not caplog.records
        from_exception(ValueError("oops"))
    assert "oops" in caplog.text


async def test_a_client_that_left_is_no_error_of_ours(caplog):
    async def handler(request):
        raise ConnectionResetError

    response = await error_middleware(None, handler)
    assert response.status == 499
    assert not caplog.records
