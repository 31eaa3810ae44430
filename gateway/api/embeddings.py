"""POST /v1/embeddings: texts as vectors, the model's last hidden states pooled and of length 1.

How they are pooled is the worker's matter, from the model's file. It knows only OpenAI's body.
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
    prompts = await completion_prompts(services, asked.inputs, "input")
    generations = started(services, prompts, asked.inputs.options, client_of(request))
    try:
        await asyncio.gather(*(generation.whole() for generation in generations))
    finally:
        for generation in generations:
            generation.close()
    counts = usage(generations)
    answer = {
        "object": "list",
        "data": [_embedding(generation, asked.is_base64) for generation in generations],
        "model": services.plan.alias,
        "usage": dict.fromkeys(("prompt_tokens", "total_tokens"), counts["prompt_tokens"]),
    }
    return json_response(answer)


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
    inputs = CompletionRequest(
        prompts=prompt_list(fields.values.get("input"), "input", MAX_INPUTS, vocab_size),
        echo=False,
        options=Options(max_tokens=0, temperature=0.0, hidden=True),
        body_bytes=len(body),
    )
    return EmbeddingsRequest(inputs, form == "base64")


def _embedding(generation: Generation, is_base64: bool) -> dict[str, Any]:
    if generation.hidden is None:
        raise engine_error("the worker sent no hidden state")
    vector = unit(generation.hidden)
    value: Any = vector.tolist()
    if is_base64:
        value = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return {"object": "embedding", "index": generation.index, "embedding": value}


def unit(vector: np.ndarray) -> np.ndarray:
    """Of length 1, so that a product of two is their cosine."""
    wide = vector.astype(np.float64)
    length = float(np.sqrt(wide @ wide))
    return (wide / length if length else wide).astype(np.float32)
