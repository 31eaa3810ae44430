"""/v1/messages as bytes: events, bodies and errors. test_anthropic_client.py has the client."""

import json

import pytest
from voltapile.gateway.engine import EngineUnavailable
from voltapile.gateway.request import Chunk

USER = [{"role": "user", "content": "hi"}]
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def encoded(tokenizer, text=PROMPT):
    return tokenizer.encode_chat(text)


def events_of(data):
    events = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        name, payload = block.split("\n")
        payload = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        events.append(payload)
    return events


async def test_a_whole_answer(post, engine, tokenizer):
    status, body = await post("/v1/messages", {"max_tokens": 20, "messages": USER})
    assert status == 200
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "tiny/model",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(encoded(tokenizer)) - 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 6,
        },
    }
    assert engine.prompts == [encoded(tokenizer)]


async def test_events(client, engine):
    engine.say("ab")
    body = {"max_tokens": 20, "messages": USER, "stream": True}
    async with client.post("/v1/messages", json=body) as response:
        found = events_of(await response.read())
    start, opened, first, second, closed, end, stop = found
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert opened["content_block"] == {"type": "text", "text": ""}
    assert [first["delta"]["text"], second["delta"]["text"]] == ["a", "b"]
    assert {event["index"] for event in (opened, first, second, closed)} == {0}
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 3
    assert stop == {"type": "message_stop"}


async def test_nothing_generated_has_no_block(client, engine):
    engine.script = [Chunk([257], finish="stop")]
    body = {"messages": USER, "stream": True}
    async with client.post("/v1/messages", json=body) as response:
        names = [event["type"] for event in events_of(await response.read())]
    assert names == ["message_start", "message_delta", "message_stop"]


async def test_pings_in_a_silence_and_an_error_as_the_last_event(serve, engine):
    client = await serve(keepalive_seconds=0.05)
    engine.script = [0.2, Chunk(finish="error", error="rank 0 died")]
    body = {"max_tokens": 5, "messages": USER, "stream": True}
    async with client.post("/v1/messages", json=body) as response:
        start, *pings, last = events_of(await response.read())
    assert start["type"] == "message_start"
    assert pings
    assert all(ping == {"type": "ping"} for ping in pings)
    assert last == {"type": "error", "error": {"type": "api_error", "message": "rank 0 died"}}


@pytest.mark.parametrize(
    ("say", "fields", "reason", "met"),
    [
        (("Hello", "length"), {}, "max_tokens", None),
        (("Hello", "stop"), {"stop_sequences": ["x", "ll"]}, "stop_sequence", "ll"),
    ],
)
async def test_why_it_stopped(post, engine, say, fields, reason, met):
    engine.say(*say)
    _, body = await post("/v1/messages", {"max_tokens": 5, "messages": USER, **fields})
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, met)


async def test_going_on_from_the_assistants_words(post, engine, tokenizer):
    messages = [*USER, {"role": "assistant", "content": "Well, "}]
    status, _ = await post("/v1/messages", {"max_tokens": 5, "messages": messages})
    assert status == 200
    assert engine.prompts == [encoded(tokenizer, PROMPT + "Well,")]


async def test_count_tokens(post, engine, tokenizer):
    status, body = await post("/v1/messages/count_tokens", {"messages": USER, "model": "any"})
    assert (status, body) == (200, {"input_tokens": len(encoded(tokenizer))})
    long = [{"role": "user", "content": "a" * 1000}]  # clients ask whether it is too long
    status, body = await post("/v1/messages/count_tokens", {"messages": long})
    assert status == 200
    assert 1000 < body["input_tokens"] < 1100
    assert not engine.prompts


async def test_a_billing_header_that_changes_does_not_change_the_prompt(post, engine):
    for key in ("a1b2c", "d3e4f"):
        header = f"x-anthropic-billing-header: cc_version=2.1.15.x; cc_entrypoint=cli; cch={key};"
        system = [{"type": "text", "text": header}, {"type": "text", "text": "Be brief."}]
        await post("/v1/messages", {"max_tokens": 5, "messages": USER, "system": system})
    first, second = engine.prompts
    assert first == second
    assert bytes(token for token in first if token < 256).startswith(b"system\nBe brief.")


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "invalid_request_error"),
        ({"messages": USER, "max_tokens": "5"}, "invalid_request_error"),
        ({"messages": USER, "stop_sequences": 5}, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "invalid_request_error"),
    ],
)
async def test_bad_bodies(post, fields, kind):
    status, body = await post("/v1/messages", fields)
    assert (status, body["type"], body["error"]["type"]) == (400, "error", kind)
    assert body["error"]["message"]


async def test_errors_of_others(client, serve, engine):
    async with client.get("/v1/messages") as response:
        assert response.status == 405
        assert (await response.json())["type"] == "error"
    async with client.get("/v1/messages/batches") as response:
        assert (await response.json())["error"]["type"] == "not_found_error"
    engine.refusal = EngineUnavailable("loading", 9)
    async with client.post("/v1/messages", json={"messages": USER}) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "9")
        assert (await response.json())["error"]["type"] == "overloaded_error"
    locked = await serve(api_keys=["secret"])
    async with locked.post("/v1/messages", json={"messages": USER}) as response:
        assert response.status == 401
        assert (await response.json())["error"]["type"] == "authentication_error"
