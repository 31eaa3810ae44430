"""What llama-server's own clients send to /completion, as a NativeRequest.

Names and defaults are llama-server's; what both APIs have is read by options.py, after its names
were changed. It does not know how the answer looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from voltapile.gateway.api.errors import bad_request
from voltapile.gateway.api.fields import Fields, kind, token_id
from voltapile.gateway.api.options import NO_DEFAULTS, UNLIMITED, Defaults, Options, read_options
from voltapile.gateway.api.schema import MAX_PROMPTS
from voltapile.workers.protocol import MAX_LOGPROBS

Prompt = list[str | int]  # texts and token ids, one after the other

DEFAULTS: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "repeat_last_n": 64,
}
PENALTIES = ("repeat_penalty", "presence_penalty", "frequency_penalty")
# Values that change nothing, of what options.py does not know.
REFUSED: dict[str, tuple[Any, ...]] = {
    "post_sampling_probs": (False,),
    "t_max_predict_ms": (0, -1),
    "lora": ([],),
    "n_indent": (0,),
    "n_cmpl": (1,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRequest:
    """is_list: several prompts were asked for, and so a list of answers is expected."""

    prompts: list[Prompt]
    is_list: bool
    options: Options
    response_fields: list[str]
    body_bytes: int


def native_request(body: bytes, vocab_size: int, defaults: Defaults = NO_DEFAULTS) -> NativeRequest:
    fields = Fields.parse(body)
    prompts, is_list = native_prompts(fields.values.get("prompt"), vocab_size)
    return NativeRequest(
        prompts=prompts,
        is_list=is_list,
        options=native_options(fields, vocab_size, defaults),
        response_fields=_response_fields(fields),
        body_bytes=len(body),
    )


def native_options(fields: Fields, vocab_size: int, defaults: Defaults) -> Options:
    for name, neutral in REFUSED.items():
        value = fields.values.get(name)
        if value is not None and value not in neutral:
            raise bad_request(f"'{name}' is not supported", name, "unsupported_parameter")
    return read_options(
        Fields(_renamed(fields.over(defaults))),
        default_tokens=UNLIMITED,
        least_tokens=0,
        logprobs=_probabilities(fields),
        vocab_size=vocab_size,
    )


def native_prompts(value: Any, vocab_size: int) -> tuple[list[Prompt], bool]:
    """A text, token ids, both mixed, or a list of any of them: (prompts, whether it is a list)."""
    if value is None:
        raise bad_request("'prompt' is missing", "prompt", "missing_required_parameter")
    if isinstance(value, dict):
        return [_mixed([value], "prompt", vocab_size)], False
    if isinstance(value, str):
        return [[value]], False
    if not isinstance(value, list):
        message = f"'prompt' must be a string or a list, not {kind(value)}"
        raise bad_request(message, "prompt", "invalid_type")
    if not value:
        raise bad_request("'prompt' must not be empty", "prompt")
    if any(isinstance(item, int) for item in value):
        return [_mixed(value, "prompt", vocab_size)], False
    if len(value) > MAX_PROMPTS:
        raise bad_request(f"{len(value)} prompts; at most {MAX_PROMPTS} at once", "prompt")
    prompts = [
        _mixed(item if isinstance(item, list) else [item], f"prompt[{i}]", vocab_size)
        for i, item in enumerate(value)
    ]
    return prompts, len(prompts) > 1


def _mixed(items: list[Any], param: str, vocab_size: int) -> Prompt:
    """One prompt. {"prompt_string"}: llama-server's text beside images, of which there are none."""
    parts: Prompt = []
    for i, item in enumerate(items):
        if isinstance(item, dict):
            item = _prompt_string(item, param)
        if not isinstance(item, str):
            token_id(item, f"{param}[{i}]", vocab_size)
        parts.append(item)
    return parts


def _prompt_string(item: dict[str, Any], param: str) -> str:
    text = item.get("prompt_string")
    if not isinstance(text, str):
        message = f"'{param}.prompt_string' must be a string, not {kind(text)}"
        raise bad_request(message, f"{param}.prompt_string", "invalid_type")
    if item.get("multimodal_data"):
        message = "this model takes text only"
        raise bad_request(message, f"{param}.multimodal_data", "unsupported_content")
    return text


def _renamed(fields: Fields) -> dict[str, Any]:
    """The fields as options.py knows them. repeat_last_n 0: no penalties."""
    values = DEFAULTS | {k: v for k, v in fields.values.items() if v is not None}
    for name in ("n_probs", "logprobs", "top_logprobs"):
        values.pop(name, None)
    if not isinstance(values["repeat_last_n"], bool) and values["repeat_last_n"] == 0:
        for name in (*PENALTIES, "repeat_last_n"):
            values.pop(name, None)
    return values


def _probabilities(fields: Fields) -> int:
    count = fields.integer("n_probs") or 0
    if not 0 <= count <= MAX_LOGPROBS:
        message = f"'n_probs' must be at least 0 and at most {MAX_LOGPROBS}, not {count}"
        raise bad_request(message, "n_probs", "out_of_range")
    return count or -1


def _response_fields(fields: Fields) -> list[str]:
    value = fields.values.get("response_fields")
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        message = "'response_fields' must be a list of strings"
        raise bad_request(message, "response_fields", "invalid_type")
    return value
