import asyncio
import contextlib
import json
import re
from dataclasses import replace

import pytest
from voltapile.gateway.api.errors import ApiError
from voltapile.gateway.api.prompt import (
    COUNTED,
    chat_ids,
    completion_prompts,
    conversation,
    encoded,
)
from voltapile.gateway.api.schema import chat_request, completion_request
from voltapile.gateway.api.services import Services
from voltapile.gateway.grammar import Grammars
from voltapile.gateway.metrics import Metrics
from voltapile.gateway.template import ChatTemplate


@pytest.fixture
def services(engine, tokenizer, template, plan):
    metrics = Metrics(engine.stats)
    return Services(
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        plan=plan,
        metrics=metrics,
        grammars=Grammars(tokenizer),
    )


def chat(content="hi", **fields):
    body = {"messages": [{"role": "user", "content": content}], **fields}
    return chat_request(json.dumps(body).encode(), 258)


async def chat_prompt(services, asked):
    return (await conversation(services, asked)).ids


async def ids_of(services, prompt):
    asked = completion_request(json.dumps({"prompt": prompt}).encode(), 258)
    [ids] = await completion_prompts(services, asked)
    return ids


async def test_a_chat_is_rendered_with_special_tokens(services):
    ids = await chat_prompt(services, chat())
    expected = [256, *b"user\nhi", 257, *b"\n", 256, *b"assistant\n"]
    assert ids == expected


async def test_template_arguments_reach_the_template(services):
    ids = await chat_prompt(services, chat(chat_template_kwargs={"shout": "HEY"}))
    assert b"HEY" in bytes(i for i in ids if i < 256)


async def test_a_text_keeps_its_special_tokens(services):
    assert await ids_of(services, "a<|im_end|>") == [97, 257]


async def test_ids_are_taken_as_they_are(services):
    assert await ids_of(services, [1, 2]) == [1, 2]


@pytest.mark.parametrize("prompt", ["", [], [[]], [""]])
async def test_an_empty_prompt_is_refused(services, prompt):
    with pytest.raises(ApiError, match="empty") as caught:
        await ids_of(services, prompt)
    assert caught.value.param == "prompt"


async def test_the_context_is_the_limit(services, plan):
    assert len(await ids_of(services, [1] * (plan.context - 1))) == plan.context - 1
    for length in (plan.context, plan.context + 1):
        with pytest.raises(ApiError, match=rf"{length} tokens.* {plan.context} tokens") as caught:
            await ids_of(services, [1] * length)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "prompt"


async def test_a_long_chat_names_messages(services):
    with pytest.raises(ApiError) as caught:
        await chat_prompt(services, chat("x" * 40_000))  # long enough to be rendered in a thread
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


async def test_what_is_only_counted_may_be_longer_than_the_context(services):
    assert len(await chat_ids(services, chat("x" * 100_000))) == 100_000 + 19
    with pytest.raises(ApiError, match="about") as caught:
        await chat_ids(services, chat("x" * (8 * COUNTED)))
    assert caught.value.code == "context_length_exceeded"


async def test_what_the_template_refuses_is_the_callers_fault(services):
    for source, error in (("{{ raise_exception('no such role') }}", "no such role"),
                          ("ok\n{{ 'a' * 10**9 if add_generation_prompt }}", "memory"),
                          ("ok\n{{ messages[0].content.x.y }}", "line 2: ")):  # fmt: skip
        with contextlib.closing(ChatTemplate(source)) as strict:
            with pytest.raises(ApiError, match=error) as caught:
                await chat_prompt(replace(services, template=strict), chat())
            assert caught.value.status == 400
            assert caught.value.param == "messages"


async def test_templates_of_many_requests_are_rendered_one_at_a_time(services):
    prompts = await asyncio.gather(*(chat_prompt(services, chat(f"n{i}")) for i in range(20)))
    assert [bytes(ids[6:-14]).count(b"n") for ids in prompts] == [1] * 20


async def test_no_template_at_all(services):
    with pytest.raises(ApiError, match="no chat template"):
        await chat_prompt(replace(services, template=None), chat())


@pytest.mark.parametrize("length", [70_000, 5_000_000])
async def test_of_a_text_that_is_far_too_long_only_the_beginning_is_tokenised(
    services, monkeypatch, length
):
    sizes, encode = [], services.tokenizer.encode

    def spied(text, **how):
        sizes.append(len(text))
        return encode(text, **how)

    monkeypatch.setattr(services.tokenizer, "encode", spied)
    with pytest.raises(ApiError, match=f"about {length} tokens > 255 maximum") as caught:
        await ids_of(services, "x" * length)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert sizes == [1 << 16]
    with pytest.raises(ApiError, match="about") as caught:
        await chat_prompt(services, chat("x" * length))
    assert caught.value.param == "messages"
    assert sizes == [1 << 16] * 2


def test_a_text_of_few_tokens_is_tokenised_whole():
    sizes = []

    def encode(text):
        sizes.append(len(text))
        return [1] * (len(text) // 1000)

    assert len(encoded(encode, " " * 500_000, 400, "prompt")) == 500
    assert sizes == [1 << 16, 1 << 18, 500_000]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
async def test_clients_know_a_prompt_that_is_too_long_by_these_words(post, path):
    """Claude Code, and LiteLLM, which aider asks through, shorten the conversation then."""
    status, body = await post(path, {"messages": [{"role": "user", "content": "a" * 300}]})
    assert status == 400
    message = body["error"]["message"]
    assert re.match(r"prompt is too long: \d+ tokens > 255 maximum", message)
    assert "This model's maximum context length is 256 tokens" in message
