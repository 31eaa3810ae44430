import pytest

PATH = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("path", [PATH, "/chat/completions"])
async def test_a_whole_answer(post, path):
    status, body = await post(path, BODY | {"model": "whatever", "return_tokens": True})
    assert status == 200
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "tiny/model")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "finish_reason": "stop",
            "logprobs": None,
            "tokens": [*b"Hello", 257],
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 21,
        "completion_tokens": 6,
        "total_tokens": 27,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert body["timings"]["predicted_n"] == 6


async def test_a_stream(events):
    *chunks, done = await events(PATH, BODY)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "H"}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello"
    assert all("role" not in delta for delta in deltas[1:])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert "timings" in chunks[-1]
    assert "usage" not in chunks[0]


async def test_usage_in_a_stream(events):
    *chunks, usage, done = await events(PATH, BODY | {"stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6


async def test_token_ids_in_a_stream(events, engine):
    engine.say("é")
    *chunks, _ = await events(PATH, BODY | {"return_tokens": True})
    assert [t for c in chunks for t in c["choices"][0].get("tokens", [])] == [*"é".encode(), 257]


async def test_length(post, engine):
    engine.say("ab", finish="length")
    _, body = await post(PATH, BODY | {"max_tokens": 2})
    assert body["choices"][0]["finish_reason"] == "length"
    assert engine.sampling[0].max_position == len(engine.prompts[0]) + 2


async def test_errors_name_the_parameter(post):
    status, body = await post(PATH, BODY | {"tools": [{"type": "function"}]})
    assert status == 400
    assert body["error"]["param"] == "tools[0].function"
    assert body["error"]["type"] == "invalid_request_error"


async def test_without_a_template(serve):
    client = await serve(template=None)
    async with client.post(PATH, json=BODY) as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "no_chat_template"


async def test_going_on_from_the_assistants_words(post, engine, tokenizer):
    words = [{"type": "text", "text": "Well, "}]
    messages = [*BODY["messages"], {"role": "assistant", "content": words}]
    given = {"continue_final_message": True, "add_generation_prompt": False}
    status, _ = await post(PATH, {"messages": messages} | given)
    assert status == 200
    start = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert engine.prompts == [tokenizer.encode_chat(f"{start}Well, ")]
    _, body = await post("/apply-template", {"messages": messages} | given)
    assert body["prompt"] == f"{start}Well, "


async def test_no_beginning_of_an_answer(post, engine, tokenizer):
    await post(PATH, BODY | {"add_generation_prompt": False})
    assert engine.prompts == [tokenizer.encode_chat("<|im_start|>user\nhi<|im_end|>\n")]


@pytest.mark.parametrize(
    ("last", "given"),
    [
        ({"role": "user", "content": "x"}, {}),
        ({"role": "assistant", "content": "x"}, {"add_generation_prompt": True}),
        ({"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f"}}]}, {}),
    ],
)  # fmt: skip
async def test_nothing_to_go_on_from(post, last, given):
    body = {"messages": [*BODY["messages"], last], "continue_final_message": True} | given
    status, answer = await post(PATH, body)
    assert (status, answer["error"]["param"]) == (400, "continue_final_message")
