"""How sampling parameters look in llama-server's bodies: /completion, /props and /slots.

It knows names only; values are the worker's, as they were sent to it.
"""

from __future__ import annotations

import math
from typing import Any

from voltapile.gateway.api.options import Options
from voltapile.gateway.api.samplers import ORDER
from voltapile.workers.protocol import Sampling


def generation_settings(
    sampling: Sampling, options: Options | None, prompt_tokens: int
) -> dict[str, Any]:
    """options: what the worker is not told; None where nothing was asked."""
    limit = -1
    if options is None or options.max_tokens is not None:
        limit = sampling.max_position - prompt_tokens
    return {
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_last_n": sampling.penalty_window or -1,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": [_bias(*pair) for pair in sampling.logit_bias.items()],
        "stop": options.stop if options else [],
        "max_tokens": limit,
        "n_predict": limit,
        "ignore_eos": bool(options and options.ignore_eos),
        "stream": bool(options and options.stream),
        "n_probs": max(0, options.logprobs) if options else 0,
        "timings_per_token": bool(options and options.timings_per_token),
        "samplers": ORDER,
    }


def _bias(token: int, bias: float) -> dict[str, Any]:
    return {"token": token, "bias": bias if math.isfinite(bias) else None}
