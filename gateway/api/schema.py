"""What clients may send: JSON bodies into ChatRequest, CompletionRequest and their Options.

Every rule that needs only the body is here; what needs the vocabulary, the template or the context
is checked in prompt.py. Defaults are OpenAI's. A parameter that would change the answer and is not
supported is refused, never ignored; unknown keys are ignored, since clients send extras.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from voltapile.gateway.api.errors import bad_request
from voltapile.gateway.api.fields import Fields, kind

MAX_STOPS = 16
MAX_STOP_LENGTH = 1000  # characters; every token is compared with all of them
MAX_PROMPTS = 256
COMPLETION_TOKENS = (
    16  # OpenAI's default for /v1/completions; a chat may go on to the context's end
)
UNLIMITED = -1
RESERVED = {"self", "messages", "tools", "add_generation_prompt"}  # the template's own arguments

# name -> values that change nothing, beside null. Anything else is refused.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({}, []),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "top_n_sigma": (-1, 0),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "grammar": ("",),
    "json_schema": ({},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to generate and how to answer. max_tokens None: until the context's end."""

    max_tokens: int | None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    return_tokens: bool = False
    stream: bool = False
    include_usage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    messages: list[dict[str, Any]]
    template_kwargs: dict[str, Any]
    options: Options
    body_bytes: int  # says how long rendering and tokenising may take


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    prompts: list[str] | list[list[int]]
    echo: bool
    options: Options
    body_bytes: int


def chat_request(body: bytes) -> ChatRequest:
    fields = Fields.parse(body)
    _refuse_unsupported(fields)
    messages = fields.list("messages")
    if not messages:
        raise bad_request("'messages' must not be empty", "messages")
    return ChatRequest(
        messages=[_message(message, i) for i, message in enumerate(messages)],
        template_kwargs=_template_kwargs(fields),
        options=_options(fields, default_tokens=UNLIMITED),
        body_bytes=len(body),
    )


def completion_request(body: bytes, vocab_size: int) -> CompletionRequest:
    fields = Fields.parse(body)
    _refuse_unsupported(fields)
    return CompletionRequest(
        prompts=_prompts(fields.values.get("prompt"), vocab_size),
        echo=fields.flag("echo"),
        options=_options(fields, default_tokens=COMPLETION_TOKENS),
        body_bytes=len(body),
    )


def token_ids(value: list[Any], param: str, vocab_size: int) -> list[int]:
    """`value` as token ids. Raises a 400 that names the first item that is none."""
    for i, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            message = f"'{param}[{i}]' must be a token id, not {kind(token)}"
            raise bad_request(message, f"{param}[{i}]", "invalid_type")
        if not 0 <= token < vocab_size:
            message = f"'{param}[{i}]' is {token}, but token ids go from 0 to {vocab_size - 1}"
            raise bad_request(message, f"{param}[{i}]", "invalid_token")
    return value


def _refuse_unsupported(fields: Fields) -> None:
    fields.text("model")  # any name will do, but it is a name
    for name, neutral in UNSUPPORTED.items():
        value = fields.values.get(name)
        if value is None or any(_same(value, other) for other in neutral):
            continue
        what = "only n = 1 is supported now" if name == "n" else f"'{name}' is not supported yet"
        raise bad_request(what, name, "unsupported_parameter")


def _same(value: Any, other: Any) -> bool:
    """Equality in which true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _options(fields: Fields, *, default_tokens: int) -> Options:
    stream = fields.flag("stream")
    stream_options = fields.object("stream_options")
    return Options(
        max_tokens=_max_tokens(fields, default_tokens),
        temperature=fields.number("temperature", 1.0, 0.0, 100.0),
        top_p=fields.number("top_p", 1.0, 0.0, 1.0, above_low=True),
        top_k=_top_k(fields),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        seed=_seed(fields),
        stop=_stops(fields.values.get("stop")),
        ignore_eos=fields.flag("ignore_eos"),
        return_tokens=fields.flag("return_tokens"),
        stream=stream,
        include_usage=stream_options.flag("include_usage"),
    )


def _max_tokens(fields: Fields, default: int) -> int | None:
    """n_predict is llama-server's name for it."""
    names = ("max_completion_tokens", "max_tokens", "n_predict")
    given = {name: value for name in names if (value := fields.integer(name)) is not None}
    if len(set(given.values())) > 1:
        raise bad_request(f"{' and '.join(given)} contradict each other", next(iter(given)))
    for name, value in given.items():
        if value < 1 and value != UNLIMITED:
            message = f"'{name}' must be at least 1 (or -1: until the context's end), not {value}"
            raise bad_request(message, name, "out_of_range")
    limit = next(iter(given.values()), default)
    return None if limit == UNLIMITED else limit


def _top_k(fields: Fields) -> int:
    value = fields.integer("top_k") or 0
    if value < -1:
        raise bad_request(f"'top_k' must be at least 0, not {value}", "top_k", "out_of_range")
    return min(max(value, 0), 2**31 - 1)


def _seed(fields: Fields) -> int:
    """A random one where it is absent or, as in llama-server, -1."""
    value = fields.integer("seed")
    return secrets.randbits(63) if value is None or value == -1 else value % 2**64


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise bad_request("'stop' must be a string or a list of strings", "stop", "invalid_type")
    if len(stops) > MAX_STOPS:
        raise bad_request(f"'stop' has {len(stops)} strings; at most {MAX_STOPS}", "stop")
    if any(not 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        message = f"each string of 'stop' must have 1 to {MAX_STOP_LENGTH} characters"
        raise bad_request(message, "stop", "out_of_range")
    return stops


def _message(message: Any, i: int) -> dict[str, Any]:
    """One chat message for the template, with everything else that the client put into it."""
    if not isinstance(message, dict):
        raise bad_request(f"'messages[{i}]' must be an object, not {kind(message)}", "messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        param = f"messages[{i}].role"
        raise bad_request(f"'{param}' must be a string, not {kind(role)}", param, "invalid_type")
    content = message.get("content")
    if content is None and role != "assistant":
        param = f"messages[{i}].content"
        raise bad_request(f"'{param}' is missing", param, "missing_required_parameter")
    return {**message, "content": _content(content, f"messages[{i}].content")}


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    kwargs = dict(fields.object("chat_template_kwargs").values)
    if reserved := sorted(RESERVED & kwargs.keys()):
        param = "chat_template_kwargs"
        raise bad_request(f"'{param}' must not hold '{reserved[0]}'", param)
    effort = fields.text("reasoning_effort")
    return kwargs if effort is None else {"reasoning_effort": effort} | kwargs


def _content(content: Any, param: str) -> str | list[dict[str, str]] | None:
    """Text or text parts; the template knows which of them its model takes."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        message = f"'{param}' must be a string or a list of parts, not {kind(content)}"
        raise bad_request(message, param, "invalid_type")
    return [_part(part, f"{param}[{i}]") for i, part in enumerate(content)]


def _part(part: Any, param: str) -> dict[str, str]:
    name = part.get("type") if isinstance(part, dict) else None
    if not isinstance(name, str):
        raise bad_request(f"'{param}' must be an object with a type", param, "invalid_type")
    if name != "text":
        message = f"'{param}' is of type '{name}'; only text is supported now"
        raise bad_request(message, param, "unsupported_content")
    if not isinstance(part.get("text"), str):
        raise bad_request(f"'{param}.text' must be a string", f"{param}.text", "invalid_type")
    return {"type": "text", "text": part["text"]}


def _prompts(value: Any, vocab_size: int) -> list[str] | list[list[int]]:
    """A string, a list of token ids, or a list of one of those."""
    if value is None:
        raise bad_request("'prompt' is missing", "prompt", "missing_required_parameter")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        message = f"'prompt' must be a string or a list, not {kind(value)}"
        raise bad_request(message, "prompt", "invalid_type")
    if not value:
        raise bad_request("'prompt' must not be empty", "prompt")
    if not isinstance(value[0], str | list):
        return [token_ids(value, "prompt", vocab_size)]
    if len(value) > MAX_PROMPTS:
        raise bad_request(f"{len(value)} prompts; at most {MAX_PROMPTS} at once", "prompt")
    if all(isinstance(item, str) for item in value):
        return value
    if not all(isinstance(item, list) for item in value):
        message = "the items of 'prompt' must be all strings or all lists of token ids"
        raise bad_request(message, "prompt", "invalid_type")
    return [token_ids(item, f"prompt[{i}]", vocab_size) for i, item in enumerate(value)]
