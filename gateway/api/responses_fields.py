"""Which fields of a Responses body mean something here: each is taken, refused in a sentence, or
has nothing to change.

Taken are all of a chat's that have the same name, and those that responses_schema.py turns into a
chat's. It reads no items and no tools.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from voltapile.gateway.api.errors import ApiError, bad_request, from_exception
from voltapile.gateway.api.fields import Fields, kind
from voltapile.gateway.api.options import Options
from voltapile.gateway.request import Refused

# Turned into a chat's fields.
OWN = ("input", "instructions", "max_output_tokens", "text", "reasoning", "tools", "tool_choice")
STORED = "nothing is stored here: send the whole conversation as 'input'"
NO_LOGPROBS = "log-probabilities are in answers of /v1/chat/completions, not of /v1/responses"
NOTHING: tuple[Any, ...] = (None, False, 0, [], {})
# name -> why it is refused, unless it asks for nothing.
REFUSED = {
    "previous_response_id": STORED,
    "conversation": STORED,
    "prompt": STORED,
    "background": "'background' is not supported: nothing is stored here for whoever asks later",
    "context_management": "'context_management' is not supported: send less as 'input'",
    "moderation": "'moderation' is not supported: nothing is moderated here",
    "logprobs": NO_LOGPROBS,
    "top_logprobs": NO_LOGPROBS,
}
# A chat's name for what has another one here.
RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "n_predict": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "functions": "tools",
    "function_call": "tool_choice",
}
SAID = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),  # the scheduler's name
    ("reasoning_effort", "reasoning.effort"),
    ("tool_choice.allowed_tools", "tool_choice"),
    ("messages", "input"),  # of items, errors speak before they are messages
)
# Of no consequence: there are no tools of a server's own to count or to tell more of, one tier, no
# cache that one could name, and events have one form. A text here still is one.
TEXTS = ("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier")
OBJECTS = ("stream_options", "prompt_cache_options", "background_options", "image",
           "access_programs")  # fmt: skip
IGNORED = (*TEXTS, *OBJECTS, "include", "max_tool_calls", "truncation", "return_tokens",
           "return_progress", "timings_per_token")  # fmt: skip
_NOT_THE_CHATS = {*OWN, *REFUSED, *RENAMED, *IGNORED}


def of_the_chat(fields: Fields) -> dict[str, Any]:
    """What a chat has under the same name. Raises a 400 for what cannot be obeyed."""
    for name, why in REFUSED.items():
        if fields.values.get(name) not in NOTHING:
            raise bad_request(why, name, "unsupported_parameter")
    for name, other in RENAMED.items():
        if fields.values.get(name) is not None:
            why = f"'{name}' is a field of /v1/chat/completions; here it is '{other}'"
            raise bad_request(why, name, "unsupported_parameter")
    _check_ignored(fields)
    return {name: fields.values[name] for name in fields.values.keys() - _NOT_THE_CHATS}


@contextmanager
def in_these_words(places: Sequence[str] = ()) -> Iterator[None]:
    """Errors of the chat that a body became name what the client has sent. places: of its tools,
    which the chat counts one after the other."""
    try:
        yield
    except (ApiError, Refused) as raised:
        raise in_its_words(from_exception(raised), places) from None


def in_its_words(error: ApiError, places: Sequence[str] = ()) -> ApiError:
    """See in_these_words."""
    tools = [(f"tools[{i}].function", place) for i, place in enumerate(places)]
    for chats, ours in (*SAID, *tools):
        error.message = error.message.replace(f"'{chats}", f"'{ours}")
        if error.param and error.param.startswith(chats):
            error.param = ours + error.param.removeprefix(chats)
    return error


def check_single(options: Options) -> None:
    if options.n != 1:
        raise bad_request("'n' is 1 here: ask as often as you like", "n", "unsupported_parameter")


def _check_ignored(fields: Fields) -> None:
    for name in TEXTS:
        fields.text(name)
    for name in OBJECTS:
        fields.object(name)
    fields.integer("max_tool_calls")
    include = fields.list("include") if fields.values.get("include") is not None else []
    if "message.output_text.logprobs" in include:
        raise bad_request(NO_LOGPROBS, "include", "unsupported_parameter")
    if (way := fields.text("truncation")) not in (None, "auto", "disabled"):
        raise bad_request(f"'truncation' must be auto or disabled, not '{way:.40}'", "truncation")
    fields.object("text").text("verbosity")
    fields.object("text").object("format").flag("strict")
    fields.object("reasoning").text("summary")


def not_a_function(value: Any, param: str) -> ApiError:
    """Of tools and choices: only the client's own functions, those of OpenAI's servers are not
    here."""
    name = value.get("type") if isinstance(value, dict) else kind(value)
    message = f"'{param}' is {name!r:.60}; only functions are supported"
    return bad_request(message, param, "unsupported_tool")
