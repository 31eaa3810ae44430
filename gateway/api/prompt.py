"""From a parsed request to the token ids that the engine gets.

Renders the chat template, tokenises (long texts off the event loop) and checks what needs the
vocabulary or the context. It does not know how tokens are generated.
"""

from __future__ import annotations

from collections.abc import Sequence

from voltapile.gateway.api.errors import bad_request
from voltapile.gateway.api.schema import ChatRequest, CompletionRequest
from voltapile.gateway.api.services import Services, off_loop
from voltapile.gateway.template import ChatTemplate, TemplateError
from voltapile.gateway.tokenizer import Tokenizer


async def chat_prompt(services: Services, chat: ChatRequest) -> list[int]:
    """The rendered messages as ids."""
    if services.template is None:
        raise bad_request("this model has no chat template", "messages", "no_chat_template")
    rendered = await _rendered(services.template, chat)
    ids = await off_loop(len(rendered), services.tokenizer.encode_chat, rendered)
    return _checked(services, ids, "messages")


async def completion_prompts(services: Services, asked: CompletionRequest) -> list[list[int]]:
    """Texts are tokenised as they stand, special tokens included; ids are taken as they are."""
    prompts = await off_loop(asked.body_bytes, _encoded, services.tokenizer, asked.prompts)
    return [_checked(services, ids, "prompt") for ids in prompts]


def _encoded(tokenizer: Tokenizer, prompts: Sequence[str] | Sequence[list[int]]) -> list[list[int]]:
    return [tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]


async def _rendered(template: ChatTemplate, chat: ChatRequest) -> str:
    try:
        return await template.rendered(chat.messages, **chat.template_kwargs)
    except TemplateError as error:
        message = f"the chat template refuses these messages: {error}"
        raise bad_request(message, "messages", "template_error") from error


def _checked(services: Services, ids: list[int], param: str) -> list[int]:
    """`ids` if there is at least one and room for one more."""
    if not ids:
        raise bad_request(f"'{param}' is empty: there is nothing to go on from", param)
    context = services.plan.context
    if len(ids) >= context:
        raise bad_request(
            f"the prompt has {len(ids)} tokens, but the context is {context} tokens and must also "
            "hold at least one generated token",
            param,
            "context_length_exceeded",
        )
    return ids
