"""Progress of a prompt, over an engine that says how far it is."""

import asyncio


async def test_each_step_of_a_prompt_is_told(serve, engine, parse):
    client = await serve()
    engine.script = [1.0, *engine.script]
    body = {"prompt": "a" * 40, "stream": True, "return_progress": True}
    async with client.post("/v1/completions", json=body) as response:
        for computed in (10, 30):
            engine.streams[0].request.computed = computed
            await asyncio.sleep(0.4)
        engine.streams[0].request.computed = 40
        payloads = parse(await response.read())
    told = [payload["prompt_progress"] for payload in payloads if "prompt_progress" in payload]
    processed = [each["processed"] for each in told]
    assert processed == sorted(processed)
    assert {10, 30, 40} <= set(processed)
    assert {each["total"] for each in told} == {40}
    assert {each["cache"] for each in told} == {1}
    first = next(i for i, p in enumerate(payloads[:-1]) if p["choices"])
    assert all("prompt_progress" not in p for p in payloads[first:-1])


async def test_timings_with_every_token(events):
    *chunks, done = await events("/v1/completions", {"prompt": "hi", "timings_per_token": True})
    assert done == "[DONE]"
    assert [chunk["timings"]["predicted_n"] for chunk in chunks] == [1, 2, 3, 4, 5, 6]


async def test_a_stream_that_breaks_while_it_is_told(events, engine):
    engine.script = [0.15, ValueError("x")]
    *_, error, done = await events("/v1/completions", {"prompt": "hi", "return_progress": True})
    assert error["error"]["code"] == "internal_error"
    assert done == "[DONE]"
