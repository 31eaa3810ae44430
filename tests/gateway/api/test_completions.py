import pytest
from voltapile.gateway.engine import EngineUnavailable

PATH = "/v1/completions"


@pytest.mark.parametrize("path", [PATH, "/completions"])
async def test_a_whole_answer(post, path, engine):
    status, body = await post(path, {"prompt": "hi", "return_tokens": True, "temperature": 0})
    assert status == 200
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hello",
            "finish_reason": "stop",
            "logprobs": None,
            "tokens": [*b"Hello", 257],
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert engine.sampling[0].temperature == 0


async def test_token_ids(post, engine):
    status, _ = await post(PATH, {"prompt": [1, 2, 3]})
    assert status == 200
    assert engine.prompts == [[1, 2, 3]]


async def test_several_prompts(post, engine):
    _, body = await post(PATH, {"prompt": ["a", "bc"]})
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "Hello"), (1, "Hello")]
    assert body["usage"]["prompt_tokens"] == 3
    assert engine.prompts == [[97], [98, 99]]


async def test_several_prompts_in_a_stream(events):
    *chunks, done = await events(
        PATH, {"prompt": [[1], [2]], "stream_options": {"include_usage": True}}
    )
    assert done == "[DONE]"
    texts = ["", ""]
    for chunk in chunks[:-1]:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == ["Hello", "Hello"]
    assert chunks[-1]["usage"]["completion_tokens"] == 12


async def test_a_stream(events):
    *chunks, done = await events(PATH, {"prompt": "hi", "stop": ["lo"]})
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hel"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("prompt", ["hi", [*b"hi"]])
async def test_echo(post, prompt):
    _, body = await post(PATH, {"prompt": prompt, "echo": True})
    assert body["choices"][0]["text"] == "hiHello"


async def test_the_context_is_the_limit(post, plan):
    status, _ = await post(PATH, {"prompt": [1] * (plan.context - 1)})
    assert status == 200
    status, body = await post(PATH, {"prompt": [1] * plan.context})
    assert status == 400
    error = body["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert error["message"].count(str(plan.context)) == 2


async def test_none_runs_if_one_is_refused(post, engine):
    submit = engine.submit

    def second_fails(*args):
        if engine.prompts:
            raise EngineUnavailable("down")
        return submit(*args)

    engine.submit = second_fails
    status, _ = await post(PATH, {"prompt": ["a", "b"]})
    assert status == 503
    assert engine.streams[0].cancelled.is_set()
