"""/completion as llama-server's clients see it."""

import pytest
from voltapile.gateway.request import Chunk


async def ask(post, **fields):
    status, body = await post("/completion", {"prompt": "hi", **fields})
    assert status == 200, body
    return body


@pytest.fixture
def native_events(client):
    async def read(**fields):
        body = {"prompt": "hi", "stream": True, **fields}
        async with client.post("/completion", json=body) as response:
            assert response.status == 200, await response.text()
            return (await response.read()).decode()

    return read


async def test_a_whole_answer(post, engine):
    body = await ask(post, n_predict=20)
    assert body["content"] == "Hello"
    assert (body["stop"], body["stop_type"], body["stopping_word"]) == (True, "eos", "")
    assert (body["tokens_predicted"], body["tokens_evaluated"]) == (6, 2)
    assert (body["tokens"], body["prompt"], body["model"]) == ([], "hi", "tiny/model")
    assert body["timings"]["predicted_n"] == 6
    assert body["generation_settings"]["n_predict"] == 20
    assert not body["truncated"]


async def test_defaults_are_llama_servers(post, engine):
    await ask(post)
    sampling = engine.sampling[0]
    found = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    assert found == (0.8, 40, 0.95, 0.05)
    assert sampling.penalty_window == 64
    assert sampling.max_position == 256  # the context's end


async def test_penalties_that_look_back_at_nothing(post, engine):
    await ask(post, repeat_last_n=0, repeat_penalty=1.3)
    assert engine.sampling[0].repetition_penalty == 1.0


async def test_why_it_stopped(post, engine):
    engine.say("Hello")
    body = await ask(post, stop=["xx", "ll"])
    assert (body["content"], body["stop_type"], body["stopping_word"]) == ("He", "word", "ll")
    engine.say("Hel", finish="length")
    assert (await ask(post))["stop_type"] == "limit"


async def test_a_stream(native_events, engine, parse):
    engine.say("a\nb")
    text = await native_events(return_progress=True)
    assert "[DONE]" not in text
    *chunks, end = parse(text.encode())
    progress = [chunk for chunk in chunks if "prompt_progress" in chunk]
    assert progress[-1]["prompt_progress"]["total"] == 2
    assert "".join(chunk["content"] for chunk in chunks) == "a\nb"
    assert [chunk["tokens"] for chunk in chunks if chunk["tokens"]] == [[97], [10], [98]]
    assert not any(chunk["stop"] for chunk in chunks)
    assert end["stop"]
    assert end["has_new_line"]
    assert (end["content"], end["stop_type"], end["tokens_predicted"]) == ("", "eos", 4)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (3, 2), (5,)])
async def test_all_tokens_are_in_a_stream_however_they_come(native_events, engine, parse, sizes):
    data = iter(b"He##o")
    engine.script = [Chunk([next(data) for _ in range(size)]) for size in sizes]
    text = await native_events(stop=["##"], return_tokens=True)
    events = parse(text.encode())
    assert [token for event in events for token in event["tokens"]] == list(b"He##")
    assert "".join(event["content"] for event in events) == "He"


async def test_timings_of_each_token(native_events, parse):
    *chunks, _ = parse((await native_events(timings_per_token=True)).encode())
    assert [chunk["timings"]["predicted_n"] for chunk in chunks] == [1, 2, 3, 4, 5]


async def test_probabilities(post, engine):
    engine.script = [
        Chunk([97], logprobs=[[(97, -0.5), (97, -0.5), (98, -2.0)]]),
        Chunk([257], finish="stop", logprobs=[[(257, -0.1), (257, -0.1), (98, -3.0)]]),
    ]
    [entry] = (await ask(post, n_probs=2))["completion_probabilities"]
    assert (entry["id"], entry["token"], entry["bytes"], entry["logprob"]) == (97, "a", [97], -0.5)
    assert [top["id"] for top in entry["top_logprobs"]] == [97, 98]
    assert engine.wants[0].logprobs == 2


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ([97, 98], [97, 98]),
        (["a", 98, "c"], [97, 98, 99]),
        ({"prompt_string": "ab"}, [97, 98]),
        (["ab"], [97, 98]),
    ],
)
async def test_forms_of_a_prompt(post, engine, prompt, ids):
    assert (await ask(post, prompt=prompt))["content"] == "Hello"
    assert engine.prompts == [ids]


async def test_several_prompts(post, engine):
    answers = await ask(post, prompt=["a", [98, "c"]])
    assert [answer["index"] for answer in answers] == [0, 1]
    assert [answer["prompt"] for answer in answers] == ["a", "bc"]


async def test_a_prompt_of_its_own(post, engine):
    await ask(post, cache_prompt=False)
    await ask(post, cache_prompt=False)
    await ask(post)
    first, second, third = engine.salts
    assert first
    assert second not in (first, b"")
    assert third == b""


async def test_only_what_was_asked_for(post):
    body = await ask(post, response_fields=["content", "generation_settings/n_predict", "none"])
    assert body == {"content": "Hello", "n_predict": -1}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, 999]}, "prompt[1]"),
        ({"prompt": ["a", [2.5]]}, "prompt[1][0]"),
        ({"prompt": [[True]]}, "prompt[0][0]"),
        ({"prompt": {"prompt_string": 5}}, "prompt.prompt_string"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "prompt.multimodal_data"),
        ({"n_probs": 21}, "n_probs"),
        ({"n_predict": "5"}, "n_predict"),
        ({"cache_prompt": 1}, "cache_prompt"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"response_fields": "content"}, "response_fields"),
        ({"repeat_last_n": -2}, "repeat_last_n"),
        ({"repeat_last_n": "x"}, "repeat_last_n"),
        ({"mirostat": 2}, "mirostat"),
    ],
)
async def test_bad_bodies(post, fields, param):
    status, body = await post("/completion", {"prompt": "hi", **fields})
    assert (status, body["error"]["param"]) == (400, param), body


@pytest.mark.parametrize("prompt", ["x" * 100_000, [97, "x" * 100_000]])
async def test_a_beginning_tells_that_a_prompt_is_far_too_long(post, engine, prompt):
    status, body = await post("/completion", {"prompt": prompt})
    assert (status, body["error"]["param"]) == (400, "prompt")
    assert "about 100000 tokens" in body["error"]["message"]
    assert engine.prompts == []


async def test_several_answers_of_one_prompt_are_a_list(post):
    status, body = await post("/completion", {"prompt": "hi", "n": 2})
    assert status == 200
    assert [(each["index"], each["content"]) for each in body] == [(0, "Hello"), (1, "Hello")]
