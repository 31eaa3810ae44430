"""POST /v1/embeddings and llama-server's /embedding: texts as vectors, the model's last hidden
states pooled and of length 1.

How they are pooled is the worker's matter, from the model's file. It knows only the bodies.
"""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
from aiohttp import web
from voltapile.gateway.api.errors import bad_request, engine_error, json_response
from voltapile.gateway.api.fields import Fields
from voltapile.gateway.api.generate import Generation, started, usage
from voltapile.gateway.api.options import Options
from voltapile.gateway.api.prompt import completion_prompts
from voltapile.gateway.api.schema import CompletionRequest, prompt_list
from voltapile.gateway.api.services import SERVICES, client_of, off_loop, read_body

MAX_INPUTS = 2048  # OpenAI's


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    inputs: CompletionRequest
    is_base64: bool


async def embeddings(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    body = await read_body(request)
    asked = await off_loop(len(body), embeddings_request, body, services.tokenizer.vocab_size)
    generations = await _computed(request, asked.inputs, "input")
    counts = usage(generations)
    answer = {
        "object": "list",
        "data": [_embedding(generation, asked.is_base64) for generation in generations],
        "model": services.plan.alias,
        "usage": dict.fromkeys(("prompt_tokens", "total_tokens"), counts["prompt_tokens"]),
    }
    return json_response(answer)


async def embedding(request: web.Request) -> web.Response:
    """{"content"} -> [{"index", "embedding": [vector]}]"""
    body = await read_body(request)
    vocab_size = request.app[SERVICES].tokenizer.vocab_size
    inputs, name = await off_loop(len(body), _native_inputs, body, vocab_size)
    generations = await _computed(request, inputs, name)
    vectors = [{"index": each.index, "embedding": [_vector(each).tolist()]} for each in generations]
    return json_response(vectors)


async def _computed(
    request: web.Request, inputs: CompletionRequest, param: str
) -> list[Generation]:
    services = request.app[SERVICES]
    prompts = await completion_prompts(services, inputs, param)
    generations = started(services, prompts, inputs.options, client_of(request))
    try:
        await asyncio.gather(*(generation.whole() for generation in generations))
    finally:
        for generation in generations:
            generation.close()
    return generations


def embeddings_request(body: bytes, vocab_size: int) -> EmbeddingsRequest:
    fields = Fields.parse(body)
    fields.text("model")
    form = fields.text("encoding_format") or "float"
    if form not in ("float", "base64"):
        message = f"'encoding_format' must be float or base64, not '{form:.40}'"
        raise bad_request(message, "encoding_format")
    if fields.values.get("dimensions") is not None:
        message = "'dimensions' is not supported: a vector has as many as the model's hidden state"
        raise bad_request(message, "dimensions", "unsupported_parameter")
    inputs = _inputs(fields, "input", vocab_size, len(body))
    return EmbeddingsRequest(inputs, form == "base64")


def _native_inputs(body: bytes, vocab_size: int) -> tuple[CompletionRequest, str]:
    """And under which name they came."""
    fields = Fields.parse(body)
    name = "embd_normalize"
    if fields.values.get(name) not in (None, 2):
        raise bad_request(f"'{name}' can only be 2: length 1", name, "unsupported_parameter")
    given = [key for key in ("content", "input") if fields.values.get(key) is not None]
    if len(given) > 1:
        raise bad_request("'content' and 'input' cannot both be given", "input")
    name = given[0] if given else "content"
    return _inputs(fields, name, vocab_size, len(body)), name


def _inputs(fields: Fields, name: str, vocab_size: int, body_bytes: int) -> CompletionRequest:
    return CompletionRequest(
        prompts=prompt_list(fields.values.get(name), name, MAX_INPUTS, vocab_size),
        echo=False,
        options=Options(max_tokens=0, temperature=0.0, hidden=True),
        body_bytes=body_bytes,
    )


def _vector(generation: Generation) -> np.ndarray:
    if generation.hidden is None:
        raise engine_error("the worker sent no hidden state")
    return unit(generation.hidden)


def _embedding(generation: Generation, is_base64: bool) -> dict[str, Any]:
    vector = _vector(generation)
    value: Any = vector.tolist()
    if is_base64:
        value = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return {"object": "embedding", "index": generation.index, "embedding": value}


def unit(vector: np.ndarray) -> np.ndarray:
    """Of length 1, so that a product of two is their cosine."""
    wide = vector.astype(np.float64)
    length = float(np.sqrt(wide @ wide))
    return (wide / length if length else wide).astype(np.float32)
