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
            stream.request.slot = slot
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
