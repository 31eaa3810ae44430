"""/v1/messages as Anthropic's own client sees it."""

import anthropic
import pytest
from voltapile.gateway.engine import EngineUnavailable
from voltapile.gateway.request import Chunk

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def api(serve):
    session = await serve(api_keys=["secret"])
    async with anthropic.AsyncAnthropic(
        base_url=str(session._base_url), api_key="secret", max_retries=0
    ) as client:
        yield client


async def test_a_message(api):
    answer = await api.messages.create(model="any", max_tokens=20, messages=MESSAGES)
    [block] = answer.content
    assert (block.type, block.text) == ("text", "Hello")
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 6)
    assert answer.usage.cache_read_input_tokens == 1


async def test_a_stream(api, engine):
    engine.say("Grüße 🦙")
    async with api.messages.stream(
        model="any", max_tokens=20, messages=MESSAGES, system="Be brief."
    ) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        message = await stream.get_final_message()
    assert text == "Grüße 🦙"
    assert message.content[0].text == text
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == len(text.encode()) + 1
    assert message.usage.cache_read_input_tokens == 1


async def test_count_tokens(api):
    counted = await api.messages.count_tokens(model="any", messages=MESSAGES)
    assert counted.input_tokens > 2


async def test_errors(api, engine):
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        await api.messages.create(
            model="any", max_tokens=5, messages=MESSAGES, extra_body={"temperature": "x"}
        )
    engine.refusal = EngineUnavailable("loading", 9)
    with pytest.raises(anthropic.APIStatusError, match="loading") as caught:
        await api.messages.create(model="any", max_tokens=5, messages=MESSAGES)
    assert caught.value.body["error"]["type"] == "overloaded_error"
    with pytest.raises(anthropic.AuthenticationError):
        await api.with_options(api_key="wrong").messages.create(
            model="any", max_tokens=5, messages=MESSAGES
        )


async def test_an_error_in_a_stream(api, engine):
    engine.script[2:] = [Chunk(finish="error", error="rank 0 died")]
    with pytest.raises(anthropic.APIStatusError, match="rank 0 died"):
        async with api.messages.stream(model="any", max_tokens=5, messages=MESSAGES) as stream:
            await stream.get_final_message()
