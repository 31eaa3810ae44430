"""What clients may send: JSON bodies into ChatRequest and CompletionRequest.

Every rule about messages and prompts that needs only the body is here, and options.py has the rest;
what needs the tokenizer, the template or the context is checked in prompt.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from voltapile.gateway.api.errors import bad_request
from voltapile.gateway.api.fields import Fields, kind, token_ids
from voltapile.gateway.api.options import (
    NO_DEFAULTS,
    UNLIMITED,
    Defaults,
    Options,
    chat_logprobs,
    completion_logprobs,
    read_options,
    thought_tokens,
)
from voltapile.gateway.api.tools import NO_TOOLS, ToolUse, checked_calls, tool_use

MAX_PROMPTS = 256
COMPLETION_TOKENS = (
    16  # OpenAI's default for /v1/completions; a chat may go on to the context's end
)
RESERVED = {"self", "messages", "tools", "add_generation_prompt"}  # the template's own arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    messages: list[dict[str, Any]]
    template_kwargs: dict[str, Any]
    options: Options
    body_bytes: int  # says how long rendering and tokenising may take
    use: ToolUse = NO_TOOLS
    splits_reasoning: bool = True  # reasoning is no content
    prefill: str = ""  # what the answer goes on from


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    prompts: list[str] | list[list[int]]
    echo: bool
    options: Options
    body_bytes: int
    suffix: str = ""  # what comes behind the answer


def chat_request(body: bytes, vocab_size: int, defaults: Defaults = NO_DEFAULTS) -> ChatRequest:
    return chat_of(Fields.parse(body).over(defaults), vocab_size, len(body))


def chat_of(fields: Fields, vocab_size: int, body_bytes: int) -> ChatRequest:
    _check_ignored(fields)
    options = read_options(
        fields,
        default_tokens=UNLIMITED,
        logprobs=chat_logprobs(fields),
        vocab_size=vocab_size,
    )
    given = fields.list("messages")
    if not given:
        raise bad_request("'messages' must not be empty", "messages")
    messages = [_message(message, i) for i, message in enumerate(given)]
    prefill = _continued(fields, messages)
    kwargs = _template_kwargs(fields)
    return ChatRequest(
        messages=messages,
        # Words of an answer come after its reasoning.
        template_kwargs={"enable_thinking": False} | kwargs if prefill else kwargs,
        prefill=prefill,
        options=options,
        body_bytes=body_bytes,
        use=tool_use(fields),
        splits_reasoning=_splits_reasoning(fields),
    )


def completion_request(
    body: bytes, vocab_size: int, defaults: Defaults = NO_DEFAULTS
) -> CompletionRequest:
    fields = Fields.parse(body).over(defaults)
    _check_ignored(fields)
    echo = fields.flag("echo")
    options = read_options(
        fields,
        default_tokens=COMPLETION_TOKENS,
        least_tokens=0 if echo else 1,
        logprobs=completion_logprobs(fields),
        vocab_size=vocab_size,
    )
    prompts = prompt_list(fields.values.get("prompt"), "prompt", MAX_PROMPTS, vocab_size)
    if len(prompts) * options.n > MAX_PROMPTS:
        message = f"{len(prompts)} prompts, {options.n} times each; at most {MAX_PROMPTS} at once"
        raise bad_request(message, "n", "out_of_range")
    suffix = fields.text("suffix") or ""
    if suffix and (echo or not all(isinstance(prompt, str) for prompt in prompts)):
        raise bad_request("'suffix' needs texts in 'prompt', and no 'echo'", "suffix")
    return CompletionRequest(
        prompts=prompts, echo=echo, options=options, body_bytes=len(body), suffix=suffix
    )


def _check_ignored(fields: Fields) -> None:
    """What changes nothing here, and still has a type."""
    fields.text("user")
    fields.flag("store")
    fields.object("metadata")


def _message(message: Any, i: int) -> dict[str, Any]:
    """One chat message for the template, with everything else that the client put into it."""
    where = f"messages[{i}]"
    if not isinstance(message, dict):
        what = f"'{where}' must be an object, not {kind(message)}"
        raise bad_request(what, where, "invalid_type")
    fields = Fields(message, f"{where}.")
    role = fields.text("role")
    if not role:
        param = f"{where}.role"
        raise bad_request(f"'{param}' is missing", param, "missing_required_parameter")
    for name in ("tool_call_id", "name"):
        fields.text(name)
    message = checked_calls(message, where)
    thought = fields.text("reasoning_content") or fields.text("reasoning")  # as vLLM names it
    if thought:
        message = {**message, "reasoning_content": thought}
    content = message.get("content")
    if content is None and role != "assistant":
        param = f"{where}.content"
        raise bad_request(f"'{param}' is missing", param, "missing_required_parameter")
    return {**message, "content": _content(content, f"{where}.content")}


def _continued(fields: Fields, messages: list[dict[str, Any]]) -> str:
    """vLLM's continue_final_message: takes the assistant's last words out of the messages."""
    name = "continue_final_message"
    if not fields.flag(name):
        return ""
    last = messages[-1]
    if len(messages) < 2 or last["role"] != "assistant" or last.get("tool_calls"):
        raise bad_request(f"'{name}' needs words of the assistant's behind others", name)
    if fields.flag("add_generation_prompt"):
        raise bad_request(f"'{name}' and 'add_generation_prompt' contradict each other", name)
    content = messages.pop()["content"] or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    kwargs = template_kwargs(fields)
    told: dict[str, Any] = {}
    effort = fields.text("reasoning_effort")
    if effort is not None:
        told["reasoning_effort"] = effort
    if effort == "none" or thought_tokens(fields) == 0:
        told["enable_thinking"] = False
    if fields.values.get("enable_thinking") is not None:
        told["enable_thinking"] = fields.flag("enable_thinking")
    if fields.values.get("documents") is not None:
        told["documents"] = fields.list("documents")
    is_ended = not fields.flag("add_generation_prompt", default=True)
    if is_ended and not fields.flag("continue_final_message"):
        told["add_generation_prompt"] = False
    return told | kwargs


def template_kwargs(fields: Fields) -> dict[str, Any]:
    """chat_template_kwargs, of any route."""
    param = "chat_template_kwargs"
    kwargs = dict(fields.object(param).values)
    if reserved := sorted(RESERVED & kwargs.keys()):
        raise bad_request(f"'{param}' must not hold '{reserved[0]}'", param)
    return kwargs


def _splits_reasoning(fields: Fields) -> bool:
    """llama-server's reasoning_format: "none" leaves it where it is."""
    value = fields.text("reasoning_format")
    if value not in (None, "none", "auto", "deepseek", "deepseek-legacy"):
        message = f"'reasoning_format' must be auto, deepseek or none, not '{value:.40}'"
        raise bad_request(message, "reasoning_format")
    return value != "none"


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
    if name not in ("text", "refusal"):
        message = f"'{param}' is of type '{name:.40}', and this model takes text only"
        raise bad_request(message, param, "unsupported_content")
    if not isinstance(part.get(name), str):
        raise bad_request(f"'{param}.{name}' must be a string", f"{param}.{name}", "invalid_type")
    return {"type": "text", "text": part[name]}


def prompt_list(value: Any, param: str, most: int, vocab_size: int) -> list[str] | list[list[int]]:
    """A string, a list of token ids, or a list of at most so many of one of those."""
    if value is None:
        raise bad_request(f"'{param}' is missing", param, "missing_required_parameter")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        message = f"'{param}' must be a string or a list, not {kind(value)}"
        raise bad_request(message, param, "invalid_type")
    if not value:
        raise bad_request(f"'{param}' must not be empty", param)
    if not isinstance(value[0], str | list):
        return [token_ids(value, param, vocab_size)]
    if len(value) > most:
        raise bad_request(f"{len(value)} prompts; at most {most} at once", param)
    if all(isinstance(item, str) for item in value):
        return value
    if not all(isinstance(item, list) for item in value):
        message = f"the items of '{param}' must be all strings or all lists of token ids"
        raise bad_request(message, param, "invalid_type")
    return [token_ids(item, f"{param}[{i}]", vocab_size) for i, item in enumerate(value)]
