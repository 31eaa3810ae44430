"""What bad input gets: a clear answer, and other requests do not notice.

Raw bodies, as clients may send what no JSON library would write. Each case is also followed by a
request that must be answered as ever.
"""

import asyncio
import io
import json

import pytest

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
CONTEXT = 256
OVERHEAD = 19  # tokens of the template around one empty message
LONG = "context_length_exceeded"


def completion(extra: bytes = b"", prompt: bytes = b'"hi"') -> bytes:
    return b'{"prompt": ' + prompt + extra + b"}"


def chat(content: bytes = b'"hi"', extra: bytes = b"") -> bytes:
    return b'{"messages": [{"role": "user", "content": ' + content + b"}]" + extra + b"}"


def deep(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def ids(count: int) -> bytes:
    return json.dumps([65] * count).encode()


def messages(count: int) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}] * count}).encode()


REFUSED = [
    # name, path, body, param, code
    ("max_tokens 0", COMPLETION, completion(b', "max_tokens": 0'), "max_tokens", "out_of_range"),
    ("max_tokens -2", COMPLETION, completion(b', "max_tokens": -2'), "max_tokens", "out_of_range"),
    ("max_tokens str", CHAT, chat(extra=b', "max_tokens": "5"'), "max_tokens", "invalid_type"),
    ("max_tokens 1.5", CHAT, chat(extra=b', "max_tokens": 1.5'), "max_tokens", "invalid_type"),
    ("max_tokens list", CHAT, chat(extra=b', "max_tokens": [1]'), "max_tokens", "invalid_type"),
    ("the context", COMPLETION, completion(prompt=ids(CONTEXT)), "prompt", LONG),
    ("one more", COMPLETION, completion(prompt=ids(257)), "prompt", LONG),
    ("1 MB of a", COMPLETION, completion(prompt=b'"%s"' % (b"a" * 1_000_000)), "prompt", LONG),
    ("1 MB of a chat", CHAT, chat(b'"%s"' % (b"a" * 1_000_000)), "messages", LONG),
    ("10,000 messages", CHAT, messages(10_000), "messages", LONG),
    ("a lone surrogate", COMPLETION, completion(prompt=rb'"\ud800"'), None, "invalid_json"),
    ("surrogates reversed", CHAT, chat(rb'"\udc00\ud800"'), None, "invalid_json"),
    ("a surrogate in UTF-8", CHAT, chat(b'"\xed\xa0\x80"'), None, "invalid_json"),
    ("a raw NUL byte", COMPLETION, completion(prompt=b'"a\0b"'), None, "invalid_json"),
    ("a NUL after the end", COMPLETION, completion() + b"\0", None, "invalid_json"),
    ("two values", COMPLETION, completion() + completion(), None, "invalid_json"),
    ("deep", COMPLETION, completion(prompt=deep(100_000)), None, "invalid_json"),
    ("deep but JSON", COMPLETION, completion(prompt=deep(900)), "prompt[0][0]", "invalid_type"),
    ("deep content", CHAT, chat(deep(900)), "messages[0].content[0]", "invalid_type"),
    ("NaN", COMPLETION, completion(b', "temperature": NaN'), None, "invalid_json"),
    ("Infinity", COMPLETION, completion(b', "temperature": Infinity'), None, "invalid_json"),
    ("1e999", COMPLETION, completion(b', "temperature": 1e999'), None, "invalid_json"),
    ("a huge temperature", COMPLETION, completion(b', "temperature": 1e300'), "temperature",
     "out_of_range"),
    ("a huge token id", COMPLETION, completion(prompt=b"[1, %d]" % 2**63), "prompt[1]",
     "invalid_token"),
    ("a huge n", COMPLETION, completion(b', "n": 100000000000000000000'), "n", "out_of_range"),
    ("a huge bias", CHAT, chat(extra=b', "logit_bias": {"1": 1e30}'), "logit_bias",
     "out_of_range"),
    ("an empty stop", COMPLETION, completion(b', "stop": ""'), "stop", "out_of_range"),
    ("an empty one of them", COMPLETION, completion(b', "stop": ["a", ""]'), "stop",
     "out_of_range"),
    ("an empty prompt", COMPLETION, completion(prompt=b'""'), "prompt", None),
    ("user 5", CHAT, chat(extra=b', "user": 5'), "user", "invalid_type"),
    ("store yes", CHAT, chat(extra=b', "store": "yes"'), "store", "invalid_type"),
    ("metadata []", COMPLETION, completion(b', "metadata": []'), "metadata", "invalid_type"),
    ("nested", CHAT, chat(extra=b', "stream_options": {"include_usage": 1}'),
     "stream_options.include_usage", "invalid_type"),
    ("an image", CHAT, chat(b'[{"type": "image_url", "image_url": {"url": "data:"}}]'),
     "messages[0].content[0]", "unsupported_content"),
    ("a file", CHAT, chat(b'[{"type": "text", "text": "a"}, {"type": "file", "file": {}}]'),
     "messages[0].content[1]", "unsupported_content"),
    ("null content", CHAT, chat(b"null"), "messages[0].content", "missing_required_parameter"),
    ("no messages", CHAT, messages(0), "messages", None),
]  # fmt: skip

TAKEN = [
    # name, path, body, tokens of the prompt, what must be at most generated
    ("max_tokens -1", COMPLETION, completion(b', "max_tokens": -1'), 2, CONTEXT - 2),
    ("max_tokens 1e9", COMPLETION, completion(b', "max_tokens": 1e9'), 2, CONTEXT - 2),
    ("max_tokens huge", COMPLETION, completion(b', "max_tokens": %d' % 10**300), 2, CONTEXT - 2),
    ("one less", COMPLETION, completion(prompt=ids(CONTEXT - 1)), CONTEXT - 1, 1),
    ("an escaped NUL", COMPLETION, completion(prompt=rb'"a\u0000b"'), 3, 16),
    ("a repeated key", COMPLETION, completion(b', "max_tokens": 3, "max_tokens": 4'), 2, 4),
    ("a huge seed", COMPLETION, completion(b', "seed": %d' % 10**40), 2, 16),
    ("no stop", COMPLETION, completion(b', "stop": []'), 2, 16),
    ("unknown and deep", COMPLETION, completion(b', "x": ' + deep(900)), 2, 16),
    (
        "user, store, metadata",
        COMPLETION,
        completion(b', "user": "u", "store": true, "metadata": {"a": "b"}'),
        2,
        16,
    ),
    ("empty content", CHAT, chat(b'""'), OVERHEAD, CONTEXT - OVERHEAD),
]


@pytest.mark.parametrize(("path", "body", "param", "code"), [case[1:] for case in REFUSED],
                         ids=[case[0] for case in REFUSED])  # fmt: skip
async def test_refused(post, engine, path, body, param, code):
    status, answer = await asyncio.wait_for(post(path, body), 10)
    assert status == 400
    error = answer["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert (error["param"], error["code"]) == (param, code)
    assert not engine.prompts, "no work before the check"
    await is_well(post)


@pytest.mark.parametrize(("path", "body", "prompt", "most"), [case[1:] for case in TAKEN],
                         ids=[case[0] for case in TAKEN])  # fmt: skip
async def test_taken(post, engine, path, body, prompt, most):
    status, answer = await post(path, body)
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] == prompt
    assert engine.sampling[0].max_position == prompt + most
    await is_well(post)


async def is_well(post):
    status, answer = await post(COMPLETION, {"prompt": "hi"})
    assert (status, answer["choices"][0]["text"]) == (200, "Hello")


@pytest.mark.parametrize("tokens", [CONTEXT, CONTEXT + 1, CONTEXT + 1000])
async def test_a_prompt_too_long_is_told_both_numbers(post, tokens):
    _, answer = await post(COMPLETION, completion(prompt=ids(tokens)))
    message = answer["error"]["message"]
    assert f"{tokens} tokens" in message
    assert f"{CONTEXT} tokens" in message


async def test_a_body_over_the_limit(serve):
    client = await serve(max_body_bytes=1 << 20)
    for extra, status in ((0, 400), (1, 413)):  # 400: it is read, and is no JSON
        async with client.post(COMPLETION, data=io.BytesIO(b"x" * ((1 << 20) + extra))) as response:
            assert response.status == status
            error = (await response.json())["error"]
            assert error["code"] == ("request_too_large" if extra else "invalid_json")
    async with client.post(COMPLETION, json={"prompt": "hi"}) as response:
        assert response.status == 200


async def test_a_body_over_the_limit_without_a_length(serve):
    client = await serve(max_body_bytes=1 << 20)

    async def endless():
        for _ in range(64):
            yield b"x" * (1 << 16)

    async with client.post(COMPLETION, data=endless()) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"


async def test_others_go_on_while_a_large_body_is_worked_on(post, engine):
    large = asyncio.create_task(post("/tokenize", b'{"content": "%s"}' % (b"ab " * 200_000)))
    answered = 0
    while not large.done():
        await asyncio.wait_for(is_well(post), 2)
        answered += 1
    assert (await large)[0] == 200
    assert answered > 3
