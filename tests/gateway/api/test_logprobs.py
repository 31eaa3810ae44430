import pytest
from voltapile.gateway.api.echo import TokenLogprob
from voltapile.gateway.api.logprobs import chat_logprobs, completion_logprobs
from voltapile.gateway.request import Chunk

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
E_ACUTE = "é".encode()


@pytest.fixture
def said(engine):
    """The engine says é! with two alternatives a token."""
    tokens = [*E_ACUTE, *b"!", 257]
    engine.script = [
        Chunk([t], "stop" if t == 257 else "", logprobs=[[(t, -0.25), (t, -0.25), (65, -2.0)]])
        for t in tokens
    ]
    return engine


def test_chat_form():
    entry = TokenLogprob(b"\xc3", -0.5, [(b"a", -1.0)], 0)
    [token] = chat_logprobs([entry])["logprobs"]["content"]
    assert token == {
        "token": "\ufffd",
        "logprob": -0.5,
        "bytes": [0xC3],
        "top_logprobs": [{"token": "a", "logprob": -1.0, "bytes": [97]}],
    }


def test_completion_form():
    entries = [
        TokenLogprob(b"ab", -0.5, [(b"x", -0.1)], 3),
        TokenLogprob(b"\xc3", -0.6, [(b"\xc3", -0.6)], 5),
    ]
    assert completion_logprobs(entries)["logprobs"] == {
        "tokens": ["ab", "bytes:\\xc3"],
        "token_logprobs": [-0.5, -0.6],
        "top_logprobs": [{"x": -0.1, "ab": -0.5}, {"bytes:\\xc3": -0.6}],
        "text_offset": [3, 5],
    }
    without = completion_logprobs([TokenLogprob(b"a", -0.5, [], 0)])
    assert without["logprobs"]["top_logprobs"] is None


async def test_a_whole_chat(post, said):
    body = MESSAGES | {"logprobs": True, "top_logprobs": 2}
    _, answer = await post(CHAT, body)
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "é!"
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == "é!".encode()
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
    assert said.wants[0].logprobs == 2


async def test_a_chat_without_alternatives(post, said):
    for chunk in said.script:
        chunk.logprobs = [entry[:1] for entry in chunk.logprobs]
    _, answer = await post(CHAT, MESSAGES | {"logprobs": True})
    assert [e["top_logprobs"] for e in answer["choices"][0]["logprobs"]["content"]] == [[]] * 3
    assert said.wants[0].logprobs == 0


async def test_a_chat_stream(events, said):
    *chunks, _ = await events(CHAT, MESSAGES | {"logprobs": True, "top_logprobs": 2})
    seen = b""
    for chunk in chunks:
        choice = chunk["choices"][0]
        text = choice["delta"].get("content", "")
        entries = (choice.get("logprobs") or {"content": []})["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode()
        seen += text.encode()
    assert seen == "é!".encode()


async def test_a_whole_completion(post, said):
    _, answer = await post(COMPLETION, {"prompt": "hi", "logprobs": 2})
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs["token_logprobs"] == [-0.25] * 3
    assert logprobs["text_offset"] == [0, 0, 1]
    assert logprobs["top_logprobs"][2] == {"!": -0.25, "A": -2.0}


async def test_a_completion_stream(events, said):
    *chunks, _ = await events(COMPLETION, {"prompt": "hi", "logprobs": 0})
    parts = [chunk["choices"][0].get("logprobs") for chunk in chunks]
    assert [t for part in parts if part for t in part["tokens"]][-1] == "!"
    assert sum(len(part["tokens"]) for part in parts if part) == 3


async def test_nothing_generated(post, engine):
    engine.script = [Chunk([257], "stop", logprobs=[[(257, -0.1)]])]
    _, answer = await post(CHAT, MESSAGES | {"logprobs": True})
    assert answer["choices"][0]["logprobs"]["content"] == []


async def test_not_wanted_not_given(post, said):
    for path, body in ((CHAT, MESSAGES), (COMPLETION, {"prompt": "hi"})):
        _, answer = await post(path, body)
        assert answer["choices"][0]["logprobs"] is None
    assert said.wants == [None, None]


@pytest.fixture
def scored(engine):
    """As lm-evaluation-harness asks: a prompt of four tokens and one token more."""
    ids = list(b"abcd")
    found = [[], *([(i, -1.0), (i, -1.0)] for i in ids[1:3]), [(ids[3], -2.0), (122, -0.5)]]
    engine.script = [
        Chunk([120], "length", logprobs=[[(120, -0.1), (120, -0.1)]], prompt_logprobs=found)
    ]
    return engine


HARNESS = {"prompt": list(b"abcd"), "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}


async def test_echo(post, scored):
    _, answer = await post(COMPLETION, HARNESS)
    choice = answer["choices"][0]
    assert choice["text"] == "abcdx"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "d", "x"],
        "token_logprobs": [None, -1.0, -1.0, -2.0, -0.1],
        "top_logprobs": [None, {"b": -1.0}, {"c": -1.0}, {"z": -0.5, "d": -2.0}, {"x": -0.1}],
        "text_offset": [0, 1, 2, 3, 4],
    }
    assert (scored.wants[0].logprobs, scored.wants[0].prompt_logprobs) == (1, 1)
    assert answer["usage"]["completion_tokens"] == 1
    assert (await post(COMPLETION, HARNESS | {"max_tokens": 0}))[1]["choices"][0] == {
        "index": 0,
        "text": "abcd",
        "finish_reason": "length",
        "logprobs": {key: value[:4] for key, value in choice["logprobs"].items()},
    }


async def test_a_streamed_echo(events, scored):
    *chunks, _ = await events(COMPLETION, HARNESS | {"n": 2})
    for index in (0, 1):
        choices = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == "abcdx"
        parts = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
        assert [o for part in parts for o in part["text_offset"]] == [0, 1, 2, 3, 4]


async def test_an_echo_without_logprobs_asks_for_none(post, scored):
    _, answer = await post(COMPLETION, HARNESS | {"logprobs": None})
    assert answer["choices"][0]["logprobs"] is None
    assert scored.wants == [None]
