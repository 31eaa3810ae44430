"""What chat and completions share, where test_chat.py and test_completions.py do not show it."""

import asyncio

import pytest
from voltapile.gateway.api import sse
from voltapile.gateway.request import Chunk

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}
PATHS = list(BODIES)


@pytest.mark.parametrize("path", PATHS)
async def test_an_engine_error_is_500(post, engine, path):
    engine.script[2:] = [Chunk(finish="error", error="rank 0 died")]
    status, body = await post(path, BODIES[path])
    assert status == 500
    assert body["error"]["message"] == "rank 0 died"
    assert body["error"]["type"] == "server_error"
    assert engine.streams[0].cancelled.is_set()


@pytest.mark.parametrize("path", PATHS)
async def test_a_grammar_that_was_refused_late_is_400(post, events, engine, path):
    engine.script[2:] = [Chunk(finish="refused", error="it is too much")]
    status, body = await post(path, BODIES[path] | {"guided_choice": ["Hello"]})
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert (body["error"]["param"], body["error"]["code"]) == ("guided_choice", "invalid_schema")
    assert body["error"]["message"] == (
        "'guided_choice' cannot be used: this answer cannot follow it any further: it is too much"
    )
    *_, last, done = await events(path, BODIES[path])
    assert (last["error"]["type"], done) == ("invalid_request_error", "[DONE]")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("failure", [Chunk(finish="error", error="rank 0 died"), ValueError("x")])
async def test_an_error_in_a_stream_is_its_last_event(events, engine, path, failure):
    engine.script[2:] = [failure]
    *chunks, last, done = await events(path, BODIES[path])
    assert len(chunks) == 2
    assert done == "[DONE]"
    assert last["error"]["type"] == "server_error"


@pytest.mark.parametrize("path", PATHS)
async def test_several_tokens_at_once_are_one_event(events, engine, path):
    engine.script = [Chunk(list(b"abc")), Chunk(list(b"def"), finish="length")]
    payloads = await events(path, BODIES[path])
    assert len(payloads) == (4 if "chat" in path else 3)  # chat's finish is its own event


async def test_comments_while_the_prompt_is_computed(serve, engine, parse):
    client = await serve(keepalive_seconds=0.05)
    engine.script = [0.2, *engine.script]
    async with client.post("/v1/completions", json={"prompt": "hi", "stream": True}) as response:
        data = await response.read()
    assert data.startswith(b": keep-alive\n\n")
    assert parse(data)[-1] == "[DONE]"


async def test_nothing_is_left_behind(post, events, engine):
    await post("/v1/completions", {"prompt": ["a", "b"]})
    await events("/v1/completions", {"prompt": ["a", "b"]})
    assert all(stream.cancelled.is_set() for stream in engine.streams)


@pytest.mark.parametrize("full", [0, sse.FULL])
async def test_a_slow_client_gets_everything_of_every_choice(
    serve, engine, parse, monkeypatch, full
):
    """What it does not read waits, merged, in the streams; nothing is lost or out of order."""
    monkeypatch.setattr(sse, "FULL", full)  # 0: each event waits for the one before it
    client = await serve()
    texts = ["".join(chr(97 + (n + k) % 26) for k in range(3000)) for n in range(120)]
    engine.script = [Chunk(list(text.encode())) for text in texts]
    engine.script.append(Chunk([257], finish="stop"))
    body = {"prompt": "hi", "n": 2, "stream": True}
    async with client.post("/v1/completions", json=body) as response:
        async with asyncio.timeout(20):
            while len(engine.streams) < 2 or any(stream.script for stream in engine.streams):
                await asyncio.sleep(0.02)
        data = await response.read()
    found, finishes = ["", ""], []
    for payload in parse(data)[:-1]:
        [choice] = payload["choices"]
        found[choice["index"]] += choice["text"]
        finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert found == ["".join(texts)] * 2
    assert finishes == ["stop", "stop"]
