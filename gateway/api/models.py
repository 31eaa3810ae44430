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
    """OpenAI's fields, Anthropic's, vLLM's (root to max_model_len) and llama-server's (meta)."""
    plan = services.plan
    made = datetime.fromtimestamp(services.started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "id": plan.alias,
        "object": "model",
        "type": "model",
        "display_name": plan.alias,
        "created_at": made,
        "max_input_tokens": plan.context - 1,
        "created": services.started,
        "owned_by": "voltapile",
        "root": plan.alias,
        "parent": None,
        "max_model_len": plan.context,
        "meta": {
            "n_ctx": plan.context,
            "n_vocab": services.tokenizer.vocab_size,
            "size": sum(each.bytes for each in plan.tensors.values()),
        },
    }
