"""GET /v1/models and /v1/models/{id}: the one model that is served."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from voltapile.gateway.api.errors import ApiError, json_response
from voltapile.gateway.api.services import SERVICES, Services


async def list_models(request: web.Request) -> web.Response:
    return json_response({"object": "list", "data": [_model(request.app[SERVICES])]})


async def get_model(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    name = request.match_info["id"]
    if name != services.plan.alias:
        message = f"no model '{name}' here, only '{services.plan.alias}'"
        raise ApiError(404, message, param="model", code="model_not_found")
    return json_response(_model(services))


def _model(services: Services) -> dict[str, Any]:
    return {
        "id": services.plan.alias,
        "object": "model",
        "created": services.started,
        "owned_by": "voltapile",
        "meta": {"n_ctx": services.plan.context, "n_vocab": services.tokenizer.vocab_size},
    }
