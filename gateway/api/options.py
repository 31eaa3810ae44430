"""Options: how to generate and how to answer, as both generating endpoints take it.

Defaults are OpenAI's. A parameter that would change the answer and is not supported is refused,
never ignored; unknown keys are ignored, since clients send extras. It does not know messages nor
prompts.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from voltapile.gateway.api.errors import bad_request
from voltapile.gateway.api.fields import Fields, kind, token_ids
from voltapile.gateway.api.samplers import obeyed
from voltapile.gateway.api.structured import Constraint, constraint
from voltapile.workers.protocol import MAX_LOGIT_BIAS, MAX_LOGPROBS

MAX_STOPS = 16
MAX_STOP_LENGTH = 1000  # characters; every token is compared with all of them
MAX_CHOICES = 16
MAX_BIAS = 100.0
NEVER = -math.inf  # llama-server's false
UNLIMITED = -1
LEAST_TOP_P = 1e-6  # the most likely token alone, as 0 means it

Defaults = Mapping[str, Any]  # fields of a request that names none, as the server was told
NO_DEFAULTS: Defaults = {}

# name -> values that change nothing, beside null. Anything else is refused.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n_probs": (0,),
    "prompt_logprobs": (),
    "typical_p": (1,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "top_n_sigma": (-1, 0),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "chat_template": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """max_tokens None: until the context's end; 0: nothing beside the echo. logprobs: so many
    alternatives; -1: none wanted."""

    max_tokens: int | None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    n: int = 1
    logprobs: int = -1
    stop: list[str] = field(default_factory=list)
    stop_ids: list[int] = field(default_factory=list)  # beside those that always end an answer
    ignore_eos: bool = False
    constraint: Constraint | None = None
    thought_tokens: int = -1  # of reasoning, most; -1: any number
    return_tokens: bool = False
    hidden: bool = False  # the prompt's pooled hidden states are wanted
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    salt: bytes = b""  # with one of its own a prompt is computed even if another has done so


def read_options(
    fields: Fields,
    *,
    default_tokens: int,
    logprobs: int,
    vocab_size: int,
    least_tokens: int = 1,
) -> Options:
    """logprobs: see chat_logprobs and completion_logprobs. Raises a 400 that names the field."""
    _refuse_unsupported(fields)
    fields = obeyed(fields)
    stream_options = fields.object("stream_options")
    return Options(
        max_tokens=_max_tokens(fields, default_tokens, least_tokens),
        temperature=fields.number("temperature", 1.0, 0.0, 100.0),
        top_p=max(fields.number("top_p", 1.0, 0.0, 1.0), LEAST_TOP_P),
        top_k=_top_k(fields),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=_repetition_penalty(fields),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        penalty_window=_penalty_window(fields),
        logit_bias=_logit_bias(fields.values.get("logit_bias"), vocab_size),
        seed=_seed(fields),
        n=_choices(fields),
        logprobs=logprobs,
        stop=_stops(fields),
        stop_ids=_stop_ids(fields, vocab_size),
        ignore_eos=fields.flag("ignore_eos"),
        constraint=constraint(fields),
        thought_tokens=thought_tokens(fields),
        return_tokens=fields.flag("return_tokens"),
        stream=fields.flag("stream"),
        include_usage=stream_options.flag("include_usage"),
        continuous_usage=stream_options.flag("continuous_usage_stats"),
        return_progress=fields.flag("return_progress"),
        timings_per_token=fields.flag("timings_per_token"),
        salt=b"" if fields.flag("cache_prompt", default=True) else secrets.token_bytes(16),
    )


def chat_logprobs(fields: Fields) -> int:
    """logprobs: true, top_logprobs: 0 to 20."""
    wanted = fields.flag("logprobs")
    count = _within(fields, "top_logprobs", 0, 0, MAX_LOGPROBS)
    if count and not wanted:
        raise bad_request("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    return count if wanted else -1


def completion_logprobs(fields: Fields) -> int:
    """logprobs: 0 to 20."""
    if fields.values.get("logprobs") is False:
        return -1
    return _within(fields, "logprobs", -1, 0, MAX_LOGPROBS)


def _refuse_unsupported(fields: Fields) -> None:
    fields.text("model")  # any name will do, but it is a name
    for name, neutral in UNSUPPORTED.items():
        value = fields.values.get(name)
        if value is None or any(_same(value, other) for other in neutral):
            continue
        raise bad_request(f"'{name}' is not supported yet", name, "unsupported_parameter")


def _same(value: Any, other: Any) -> bool:
    """Equality in which true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _within(fields: Fields, name: str, default: int, low: int, high: int) -> int:
    value = fields.integer(name)
    if value is None:
        return default
    if not low <= value <= high:
        message = f"'{name}' must be at least {low} and at most {high}, not {value}"
        raise bad_request(message, name, "out_of_range")
    return value


def _max_tokens(fields: Fields, default: int, least: int) -> int | None:
    """n_predict is llama-server's name for it."""
    names = ("max_completion_tokens", "max_tokens", "n_predict")
    given = {name: value for name in names if (value := fields.integer(name)) is not None}
    if len(set(given.values())) > 1:
        raise bad_request(f"{' and '.join(given)} contradict each other", next(iter(given)))
    for name, value in given.items():
        if value < least and value != UNLIMITED:
            message = (
                f"'{name}' must be at least {least} (or -1: until the context's end), not {value}"
            )
            raise bad_request(message, name, "out_of_range")
    limit = next(iter(given.values()), default)
    return None if limit == UNLIMITED else limit


def thought_tokens(fields: Fields) -> int:
    """llama-server's reasoning_budget, or vLLM's name for it; -1: any number."""
    for name in ("reasoning_budget", "thinking_budget_tokens", "thinking_token_budget"):
        value = fields.integer(name)
        if value is not None and value < -1:
            message = f"'{name}' must be at least 0 (or -1: any number of tokens), not {value}"
            raise bad_request(message, name, "out_of_range")
        if value is not None:
            return value
    return -1


def _top_k(fields: Fields) -> int:
    value = fields.integer("top_k") or 0
    if value < -1:
        raise bad_request(f"'top_k' must be at least 0, not {value}", "top_k", "out_of_range")
    return min(max(value, 0), 2**31 - 1)


def _seed(fields: Fields) -> int:
    """A random one where it is absent or, as in llama-server, -1."""
    value = fields.integer("seed")
    return secrets.randbits(63) if value is None or value == -1 else value % 2**64


def _repetition_penalty(fields: Fields) -> float:
    """repeat_penalty is llama-server's name for it."""
    names = ("repetition_penalty", "repeat_penalty")
    values = {
        fields.number(name, 1.0, 0.0, 100.0, above_low=True)
        for name in names
        if fields.values.get(name) is not None
    }
    if len(values) > 1:
        raise bad_request(f"{' and '.join(names)} contradict each other", names[0])
    return values.pop() if values else 1.0


def _penalty_window(fields: Fields) -> int:
    """llama-server's repeat_last_n; -1 there and 0 at the workers: all tokens."""
    value = fields.integer("repeat_last_n")
    if value is None or value == -1:
        return 0
    if value < 1:
        message = f"'repeat_last_n' must be at least 1 (or -1: all tokens), not {value}"
        raise bad_request(message, "repeat_last_n", "out_of_range")
    return min(value, 2**31 - 1)


def _choices(fields: Fields) -> int:
    n = _within(fields, "n", 1, 1, MAX_CHOICES)
    best_of = fields.integer("best_of")
    if best_of is not None and best_of != n:
        message = f"'best_of' is supported only where it equals 'n', which is {n}"
        raise bad_request(message, "best_of", "unsupported_parameter")
    return n


def _logit_bias(value: Any, vocab_size: int) -> dict[int, float]:
    """{"id": bias}, or llama-server's [[id, bias or false]]."""
    if value is None:
        return {}
    if not isinstance(value, dict | list):
        message = f"'logit_bias' must map token ids to numbers, not be {kind(value)}"
        raise bad_request(message, "logit_bias", "invalid_type")
    if len(value) > MAX_LOGIT_BIAS:
        raise bad_request(f"'logit_bias' has {len(value)} entries; at most {MAX_LOGIT_BIAS}",
                          "logit_bias", "out_of_range")  # fmt: skip
    pairs: Iterable[Any] = value.items() if isinstance(value, dict) else value
    return dict(_bias(pair, vocab_size) for pair in pairs)


def _bias(pair: Any, vocab_size: int) -> tuple[int, float]:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        message = "each item of 'logit_bias' must be a token id and a number"
        raise bad_request(message, "logit_bias", "invalid_type")
    name, value = pair
    token = name
    if isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 10:
        token = int(name)
    if isinstance(token, bool) or not isinstance(token, int):
        message = f"'logit_bias' has {name!r:.40} where a token id is needed"
        raise bad_request(message, "logit_bias", "invalid_type")
    if not 0 <= token < vocab_size:
        message = f"'logit_bias' names token {token}, but token ids go from 0 to {vocab_size - 1}"
        raise bad_request(message, "logit_bias", "invalid_token")
    if value is False:
        return token, NEVER
    if isinstance(value, bool) or not isinstance(value, int | float):
        message = f"the bias of token {token} must be a number, not {kind(value)}"
        raise bad_request(message, "logit_bias", "invalid_type")
    if not -MAX_BIAS <= value <= MAX_BIAS:
        message = f"the bias of token {token} must be within -100 and 100, not {value}"
        raise bad_request(message, "logit_bias", "out_of_range")
    return token, float(value)


def _stops(fields: Fields) -> list[str]:
    """stop_sequences is Anthropic's name for it."""
    name = "stop" if fields.values.get("stop") is not None else "stop_sequences"
    value = fields.values.get(name)
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise bad_request(f"'{name}' must be a string or a list of strings", name, "invalid_type")
    if len(stops) > MAX_STOPS:
        raise bad_request(f"'{name}' has {len(stops)} strings; at most {MAX_STOPS}", name)
    if any(not 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        message = f"each string of '{name}' must have 1 to {MAX_STOP_LENGTH} characters"
        raise bad_request(message, name, "out_of_range")
    return stops


def _stop_ids(fields: Fields, vocab_size: int) -> list[int]:
    """vLLM's stop_token_ids."""
    name = "stop_token_ids"
    if fields.values.get(name) is None:
        return []
    return token_ids(fields.list(name), name, vocab_size)
