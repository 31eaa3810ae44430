import asyncio

import pytest


async def get(client, path):
    async with client.get(path) as response:
        return response.status, await response.json()


async def test_props(client):
    status, body = await get(client, "/props")
    assert status == 200
    assert (body["total_slots"], body["model_alias"]) == (4, "tiny/model")
    assert body["default_generation_settings"]["n_ctx"] == 256
    assert body["default_generation_settings"]["params"]["top_k"] == 40
    assert "<|im_start|>" in body["chat_template"]
    assert body["eos_token"] == "<|im_end|>"
    assert body["modalities"] == {"vision": False, "audio": False}


async def test_the_order_that_is_told_is_the_one_that_is_taken(client, post):
    _, body = await get(client, "/props")
    params = body["default_generation_settings"]["params"]
    assert params["samplers"] == ["penalties", "temperature", "top_k", "top_p", "min_p"]
    wanted = ("samplers", "temperature", "top_k", "top_p", "min_p")
    told = {name: params[name] for name in wanted}
    status, answer = await post("/completion", {"prompt": "a", "n_predict": 1, **told})
    assert status == 200
    assert {name: answer["generation_settings"][name] for name in wanted} == told


async def test_defaults_of_the_server(serve, engine):
    client = await serve(
        defaults={"temperature": 0.25, "top_k": 7, "repeat_penalty": 1.5, "seed": 3}
    )
    _, body = await get(client, "/props")
    params = body["default_generation_settings"]["params"]
    assert (params["temperature"], params["top_k"], params["min_p"]) == (0.25, 7, 0.05)
    assert (params["repeat_penalty"], params["seed"]) == (1.5, 3)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    text = {"prompt": "hi", "max_tokens": 1}
    bodies = {"chat/completions": chat, "completions": text, "messages": chat}
    for path, asked in bodies.items():
        for values in ({}, {"temperature": 0, "top_k": None}):
            async with client.post(f"/v1/{path}", json=asked | values) as response:
                assert response.status == 200, path
    async with client.post("/completion", json=text | {"top_k": 3}) as response:
        assert response.status == 200
    drawn = [(each.temperature, each.top_k) for each in engine.sampling]
    assert drawn == [(0.25, 7), (0, 7)] * 3 + [(0.25, 3)]
    assert engine.sampling[0].min_p == 0  # as without such an option


async def test_idle_slots(client):
    status, body = await get(client, "/slots")
    assert status == 200
    assert [slot["id"] for slot in body] == [0, 1, 2, 3]
    assert not any(slot["is_processing"] for slot in body)


@pytest.fixture
async def busy(client, engine):
    """The engine's streams with slots 1, 0, 2 and 3, which go on."""
    engine.say("ab", finish="")
    body = {"prompt": ["a", "b", "c", "d"], "stream": True, "temperature": 0.25, "max_tokens": 9}
    async with client.post("/v1/completions", json=body) as response:
        await response.content.readline()
        for stream, slot in zip(engine.streams, [1, 0, 2, 3], strict=True):
            stream.request.enter(slot)
        await asyncio.sleep(0.05)
        yield


@pytest.mark.usefixtures("busy")
async def test_busy_slots(client):
    _, body = await get(client, "/slots")
    assert all(slot["is_processing"] for slot in body)
    assert body[1]["next_token"][0]["n_decoded"] == 2
    assert body[1]["next_token"][0]["n_remain"] == 7
    assert (await get(client, "/slots?fail_on_no_slot=1"))[0] == 503


async def test_apply_template(post, engine):
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"shout": "!"}}
    status, answer = await post("/apply-template", body)
    expected = "<|im_start|>user\nhi<|im_end|>\n!<|im_start|>assistant\n"
    assert (status, answer) == (200, {"prompt": expected})
    assert not engine.prompts
    assert (await post("/apply-template", {}))[0] == 400


async def test_no_template(serve):
    client = await serve(template=None)
    assert (await get(client, "/props"))[1]["chat_template"] == ""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with client.post("/apply-template", json=body) as response:
        assert (await response.json())["error"]["code"] == "no_chat_template"
