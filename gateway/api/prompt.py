"""From a parsed request to the token ids that the engine gets.

Renders the chat template, tokenises (long texts off the event loop) and checks what needs the
vocabulary or the context. It does not know how tokens are generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from voltapile.gateway.api.errors import ApiError, bad_request
from voltapile.gateway.api.reading import Reading, reading_of
from voltapile.gateway.api.schema import ChatRequest, CompletionRequest
from voltapile.gateway.api.services import Services, off_loop
from voltapile.gateway.template import TemplateError
from voltapile.gateway.tokenizer import Tokenizer

BEGINNING, LEAST_BEGINNING = 8, 1 << 16  # characters: for each token of the context, and in all

COUNTED = 1 << 18  # tokens of a chat that is only counted


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat as the model sees it, and how its answer is to be read."""

    ids: list[int]
    reading: Reading


async def conversation(services: Services, chat: ChatRequest) -> Conversation:
    text = await rendered(services, chat)
    encode, context = services.tokenizer.encode_chat, services.plan.context
    ids = await off_loop(len(text), encoded, encode, text, context, "messages")
    assert services.template is not None
    reading = reading_of(services.tokenizer, services.template, chat, text)
    return Conversation(checked(ids, context, "messages"), reading)


async def chat_ids(services: Services, chat: ChatRequest) -> list[int]:
    """To be counted: they may be more than the context holds."""
    text = await rendered(services, chat)
    encode, context = services.tokenizer.encode_chat, services.plan.context
    return await off_loop(len(text), encoded, encode, text, context, "messages", COUNTED)


async def completion_prompts(
    services: Services, asked: CompletionRequest, param: str = "prompt"
) -> list[list[int]]:
    """Texts are tokenised as they stand, special tokens included; ids are taken as they are."""
    context = services.plan.context
    prompts = await off_loop(
        asked.body_bytes, _all_encoded, services.tokenizer, asked.prompts, context, param
    )
    return [checked(ids, context, param) for ids in prompts]


def _all_encoded(
    tokenizer: Tokenizer, prompts: Sequence[str | list[int]], context: int, param: str
) -> list[list[int]]:
    encode = tokenizer.encode
    return [encoded(encode, p, context, param) if isinstance(p, str) else p for p in prompts]


def encoded(
    encode: Callable[[str], list[int]], text: str, context: int, param: str, most: int = 0
) -> list[int]:
    """The ids of `text`, if they are at most so many, or not far more than the context holds. A
    token takes 150 bytes while it is found, so beginnings are tried first: one that is far too
    long says enough of the whole."""
    most = max(most, 2 * context)
    size = max(LEAST_BEGINNING, BEGINNING // 2 * most)
    while size < len(text):
        count = len(encode(text[:size]))
        if count > most:
            raise _too_long(f"about {count * len(text) // size}", context, param)
        size *= 4
    return encode(text)


async def rendered(services: Services, chat: ChatRequest) -> str:
    """The messages as the text that the model sees."""
    if services.template is None:
        raise bad_request("this model has no chat template", "messages", "no_chat_template")
    try:
        shown = chat.use.shown or None
        kwargs = chat.template_kwargs
        text = await services.template.rendered(chat.messages, tools=shown, **kwargs)
    except TemplateError as error:
        message = f"the chat template refuses these messages: {error}"
        raise bad_request(message, "messages", "template_error") from error
    return text + chat.prefill


def checked(ids: list[int], context: int, param: str) -> list[int]:
    """`ids` if there is at least one and room for one more."""
    if not ids:
        raise bad_request(f"'{param}' is empty: there is nothing to go on from", param)
    if len(ids) >= context:
        raise _too_long(str(len(ids)), context, param)
    return ids


def _too_long(tokens: str, context: int, param: str) -> ApiError:
    """In the words by which clients know that they must shorten a conversation: the first half is
    Anthropic's, the second OpenAI's."""
    message = (
        f"prompt is too long: {tokens} tokens > {context - 1} maximum. This model's maximum "
        f"context length is {context} tokens, and at least one of them must be generated"
    )
    return bad_request(message, param, "context_length_exceeded")
