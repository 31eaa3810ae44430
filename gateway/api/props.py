"""GET /props and /slots, POST /apply-template: what llama-server tells of itself and its work.

It reads and changes nothing. A slot here is a row of the Plan's; what waits has none and is not
shown.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web
from voltapile.gateway.api.errors import ApiError, json_response
from voltapile.gateway.api.generate import Generation
from voltapile.gateway.api.native_schema import DEFAULTS
from voltapile.gateway.api.prompt import rendered
from voltapile.gateway.api.schema import chat_request
from voltapile.gateway.api.services import SERVICES, Services, off_loop, read_body
from voltapile.gateway.api.settings import generation_settings
from voltapile.workers.protocol import Sampling


async def props(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    settings = {"params": _default_settings(services), "n_ctx": services.plan.context}
    template = services.template
    body = {
        "default_generation_settings": settings,
        "total_slots": services.plan.slots,
        "model_alias": services.plan.alias,
        "model_path": services.plan.model[0] if services.plan.model else "",
        "modalities": {"vision": False, "audio": False},
        "chat_template": template.source if template else "",
        "bos_token": _text(services, services.tokenizer.bos_id),
        "eos_token": _text(services, services.tokenizer.eos_id),
        "build_info": "voltapile",
        "is_sleeping": False,
    }
    return json_response(body)


async def slots(request: web.Request) -> web.Response:
    """fail_on_no_slot=1: 503 when all are taken."""
    services = request.app[SERVICES]
    taken = {each.slot: each for each in services.live if not each.is_waiting}
    if request.query.get("fail_on_no_slot") and len(taken) >= services.plan.slots:
        message = "no slot available"
        raise ApiError(503, message, kind="service_unavailable", code="unavailable")
    states = [_slot(services, i, taken.get(i)) for i in range(services.plan.slots)]
    return json_response(states)


async def apply_template(request: web.Request) -> web.Response:
    """{"messages", ...} as for a chat -> {"prompt"}."""
    services = request.app[SERVICES]
    body = await read_body(request)
    known = services.tokenizer.vocab_size, services.defaults
    chat = await off_loop(len(body), chat_request, body, *known)
    return json_response({"prompt": await rendered(services, chat)})


def _slot(services: Services, index: int, generation: Generation | None) -> dict[str, Any]:
    state: dict[str, Any] = {
        "id": index,
        "n_ctx": services.plan.context,
        "speculative": False,
        "is_processing": generation is not None,
    }
    if generation is None:
        return state
    sampling = generation.sampling
    last = sampling.max_position - generation.prompt_tokens
    state |= {
        "id_task": generation.number,
        "params": generation_settings(sampling, generation.options, generation.prompt_tokens),
        "prompt_progress": generation.progress(),
        "next_token": [
            {
                "has_next_token": True,
                "n_remain": last - generation.completion_tokens,
                "n_decoded": generation.completion_tokens,
            }
        ],
    }
    return state


def _default_settings(services: Services) -> dict[str, Any]:
    """Of /completion, as llama-server's clients read them."""
    defaults = {**DEFAULTS, **services.defaults}
    sampling = Sampling(
        temperature=defaults["temperature"],
        top_k=defaults["top_k"],
        top_p=defaults["top_p"],
        min_p=defaults["min_p"],
        penalty_window=max(0, defaults["repeat_last_n"]),  # -1: all, which is 0 there
        repetition_penalty=defaults.get("repeat_penalty", 1.0),
        presence_penalty=defaults.get("presence_penalty", 0.0),
        frequency_penalty=defaults.get("frequency_penalty", 0.0),
    )
    settings = generation_settings(sampling, None, 0)
    told = {"seed": defaults.get("seed", -1), "max_tokens": -1, "n_predict": -1}
    return settings | told


def _text(services: Services, token: int | None) -> str:
    if token is None:
        return ""
    return services.tokenizer.token_bytes(token).decode("utf-8", "replace")
