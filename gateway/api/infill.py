"""POST /infill: llama-server's route for editors, which fills the gap between two texts.

It reads the body; the answer is /completion's. Models that were not taught to fill gaps refuse.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aiohttp import web
from voltapile.gateway.api.errors import bad_request
from voltapile.gateway.api.fields import Fields, kind
from voltapile.gateway.api.native import native_answer
from voltapile.gateway.api.native_schema import NativeRequest, native_options
from voltapile.gateway.api.prompt import encoded
from voltapile.gateway.api.services import SERVICES, Services, off_loop, read_body
from voltapile.gateway.fim import Filler, Other

MAX_OTHERS = 1024


async def infill(request: web.Request) -> web.StreamResponse:
    """{"input_prefix", "input_suffix", "input_extra": [{"filename", "text"}], "prompt"}"""
    services = request.app[SERVICES]
    body = await read_body(request)
    asked = await off_loop(len(body), _infill_request, body, services)
    return await native_answer(request, services, asked)


def filler_of(services: Services, param: str) -> Filler:
    """param: what asks for it. Raises a 400 where the model fills no gaps."""
    filler = Filler.of(services.tokenizer)
    if filler is None:
        message = "this model cannot fill in the middle: its vocabulary has no markers for that"
        raise bad_request(message, param, "not_supported")
    return filler


def _infill_request(body: bytes, services: Services) -> NativeRequest:
    fields = Fields.parse(body)
    before, behind = (_given(fields, name, name) for name in ("input_prefix", "input_suffix"))
    begun = fields.text("prompt") or ""
    others = _others(fields.values.get("input_extra"))
    options = native_options(fields, services.tokenizer.vocab_size, services.defaults)
    context, filler = services.plan.context, filler_of(services, "input_suffix")
    answer = context // 4 if options.max_tokens is None else options.max_tokens
    most = max(0, context - 1 - answer)
    prompt = filler.prompt(
        encoded(filler.ids, before, context, "input_prefix"),
        encoded(filler.ids, behind, context, "input_suffix"),
        encoded(filler.ids, begun, context, "prompt"),
        others,
        most,
    )
    return NativeRequest(
        prompts=[[*prompt]],
        is_list=False,
        options=replace(options, stop_ids=[*options.stop_ids, *filler.ends]),
        response_fields=[],
        body_bytes=len(body),
    )


def _given(fields: Fields, name: str, param: str) -> str:
    value = fields.text(name)
    if value is None:
        raise bad_request(f"'{param}' is missing", param, "missing_required_parameter")
    return value


def _others(value: Any) -> list[Other]:
    name = "input_extra"
    if value is None:
        return []
    if not isinstance(value, list):
        raise bad_request(f"'{name}' must be a list, not {kind(value)}", name, "invalid_type")
    if len(value) > MAX_OTHERS:
        raise bad_request(f"'{name}' has {len(value)} items; at most {MAX_OTHERS}", name)
    return [_other(item, f"{name}[{i}]") for i, item in enumerate(value)]


def _other(item: Any, param: str) -> Other:
    if not isinstance(item, dict):
        raise bad_request(f"'{param}' must be an object, not {kind(item)}", param, "invalid_type")
    fields = Fields(item, f"{param}.")
    return Other(fields.text("filename") or "tmp", _given(fields, "text", f"{param}.text"))
