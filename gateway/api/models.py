"""GET /v1/models and /v1/models/{id}: the one model that is served."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from voltapile.gateway.api.errors import ApiError, json_response
from voltapile.gateway.api.services import SERVICES, Services


async def list_models(request: web.Request) -> web.Response:
    """In OpenAI's form and Anthropic's at once: their fields have other names."""
    model = _model(request.app[SERVICES])
    page = {"has_more": False, "first_id": model["id"], "last_id": model["id"]}
    return json_response({"object": "list", "data": [model]} | page)


async def get_model(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    name = request.match_info["id"]
    if name != services.plan.alias:
        message = f"no model '{name}' here, only '{services.plan.alias}'"
        raise ApiError(404, message, param="model", code="model_not_found")
    return json_response(_model(services))


def _model(services: Services) -> dict[str, Any]:
    made = datetime.fromtimestamp(services.started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "id": services.plan.alias,
        "object": "model",
        "type": "model",
        "display_name": services.plan.alias,
        "created_at": made,
        "max_input_tokens": services.plan.context - 1,
        "created": services.started,
        "owned_by": "voltapile",
        "meta": {"n_ctx": services.plan.context, "n_vocab": services.tokenizer.vocab_size},
    }
