"""The whole API as OpenAI's own client sees it."""

import openai
import pytest
from voltapile.gateway.engine import EngineUnavailable
from voltapile.gateway.request import Chunk

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def api(serve):
    session = await serve(api_keys=["secret"])
    url = str(session._base_url / "v1")
    async with openai.AsyncOpenAI(base_url=url, api_key="secret", max_retries=0) as client:
        yield client


async def test_models(api):
    assert [model.id async for model in api.models.list()] == ["tiny/model"]
    assert (await api.models.retrieve("tiny/model")).owned_by == "voltapile"


async def test_chat(api):
    answer = await api.chat.completions.create(model="x", messages=MESSAGES, max_tokens=20)
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 6


async def test_a_streamed_chat(api):
    stream = await api.chat.completions.create(
        model="x", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    async for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == "Hello"
    assert usage.total_tokens == 27


async def test_completions(api):
    answer = await api.completions.create(model="x", prompt=[1, 2], temperature=0)
    assert answer.choices[0].text == "Hello"
    stream = await api.completions.create(model="x", prompt="a", stream=True, stop="lo")
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hel"


async def test_errors_become_its_exceptions(api, engine):
    with pytest.raises(openai.BadRequestError, match="at least 1") as caught:
        await api.completions.create(model="x", prompt="a", max_tokens=0)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.AuthenticationError):
        await api.with_options(api_key="wrong").models.list()
    engine.refusal = EngineUnavailable("loading")
    with pytest.raises(openai.InternalServerError, match="loading"):
        await api.completions.create(model="x", prompt="a")


async def test_an_error_in_a_stream_is_raised(api, engine):
    engine.script[2:] = [Chunk(finish="error", error="rank 0 died")]
    stream = await api.completions.create(model="x", prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="rank 0 died"):
        async for _ in stream:
            pass


async def test_logprobs(api, engine):
    def script():
        ends = {257: "stop"}
        row = [(1, -9.0)]
        return [
            Chunk([t], ends.get(t, ""), logprobs=[[(t, -0.5), (t, -0.5), *row]])
            for t in (*b"ab", 257)
        ]

    engine.script = script()
    asked = {"model": "x", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    answer = await api.chat.completions.create(**asked)
    first = answer.choices[0].logprobs.content[0]
    assert (first.token, first.bytes, len(first.top_logprobs)) == ("a", [97], 2)
    engine.script = script()
    stream = await api.chat.completions.create(**asked, stream=True)
    entries = [c.choices[0].logprobs async for c in stream]
    assert [entry.content[0].token for entry in entries if entry] == ["a", "b"]
    engine.script = script()
    answer = await api.completions.create(model="x", prompt="a", logprobs=2)
    assert answer.choices[0].logprobs.tokens == ["a", "b"]
    assert answer.choices[0].logprobs.top_logprobs[0] == {"a": -0.5, "\x01": -9.0}


async def test_several_choices(api, engine):
    answer = await api.chat.completions.create(
        model="x", messages=MESSAGES, n=3, logit_bias={"5": -100}, presence_penalty=1, seed=7
    )
    assert [(c.index, c.message.content) for c in answer.choices] == [
        (i, "Hello") for i in range(3)
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (21, 18)
    assert [s.seed for s in engine.sampling] == [7, 8, 9]
    assert engine.sampling[0].logit_bias == {5: -100.0}
    stream = await api.chat.completions.create(model="x", messages=MESSAGES, n=2, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["Hello"] * 2


async def test_a_scored_prompt(api, engine):
    engine.script = [
        Chunk([120], "length", logprobs=[[(120, -0.1)]], prompt_logprobs=[[], [(98, -2.0)]])
    ]
    answer = await api.completions.create(
        model="x", prompt="ab", max_tokens=0, echo=True, logprobs=0
    )
    assert answer.choices[0].text == "ab"
    assert answer.choices[0].logprobs.tokens == ["a", "b"]
    assert answer.choices[0].logprobs.token_logprobs == [None, -2.0]
    assert answer.choices[0].logprobs.text_offset == [0, 1]
