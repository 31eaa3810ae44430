"""HTTP over the real engine and a worker that computes a Step whenever the test lets it."""

import asyncio
import contextlib

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from voltapile.gateway.api.app import listening, make_app
from voltapile.gateway.engine import Engine
from voltapile.topology.plan import CacheGroup, RankPlan, plan_id
from voltapile.topology.share import Share
from voltapile.workers.protocol import Ready, Result, Sampled, Step, Stop, decode, encode

COMPLETION = "/v1/completions"
CUT = {"index": 0, "text": "x", "finish_reason": "length", "logprobs": None}
SLOTS = 2


class HeldWorker:
    """Says "x" for every sampling row; go: as long as it is set. steps: all that it computed."""

    def __init__(self, plan):
        self.plan = plan
        self.go = asyncio.Event()
        self.go.set()
        self.waits = False  # a Step is here and may not run
        self.steps = []
        self.known = {}
        self.limit = {}

    async def run(self, socket):
        await socket.send_multipart(encode(Ready(name="text-0", plan=self.plan.id)))
        while True:
            step = decode(await socket.recv_multipart())
            if isinstance(step, Stop):
                return
            if not isinstance(step, Step):
                continue  # a Hold: no Step has more than one round here
            self.waits = not self.go.is_set()
            await self.go.wait()
            self.steps.append(step)
            await socket.send_multipart(encode(self.compute(step)))

    def compute(self, step):
        for slot in step.release:
            self.known.pop(slot, None)
        rows = []
        for row in step.rows:
            if row.sampling is not None:
                assert row.slot not in self.known, "the slot was not released"
                self.known[row.slot], self.limit[row.slot] = 0, row.sampling.max_position
            self.known[row.slot] += len(row.tokens)
            if row.sample:
                rows.append(self.sampled(row.slot))
        return Result(id=step.id, rows=rows)

    def sampled(self, slot):
        self.known[slot] += 1
        over = self.known[slot] - self.limit[slot]
        if over > 0:
            return Sampled(slot=slot)
        return Sampled(slot=slot, tokens=[ord("x")], finish="length" if over == 0 else "")


SHARE = Share(layers=[0], heads=(0, 1), kv_heads=(0, 1), head_map=[0], ffn=(0, 1), vocab=(0, 1))


@pytest.fixture
def real_plan(plan, tmp_path):
    cache = CacheGroup(
        kind="full", layers=[0], kv_heads=1, key_dim=8, value_dim=8, window=0, key_type="f16",
        value_type="f16", page_tokens=4, page_bytes=1, pages=200,
    )  # fmt: skip
    rank = RankPlan(
        rank=0, device="cpu", node=0, cpus=[0], threads=1, memory={}, mapped_bytes=0,
        share=SHARE, page_bytes=[1],
    )  # fmt: skip
    bare = msgspec.structs.replace(
        plan, endpoint=f"ipc://{tmp_path}/s", slots=SLOTS, batch_tokens=128, ranks=[rank],
        caches=[cache],
    )  # fmt: skip
    return msgspec.structs.replace(bare, id=plan_id(bare))


@pytest.fixture
async def stack(real_plan, tokenizer, template):
    """(client, engine, worker)."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.IDENTITY, b"text-0")
    worker = HeldWorker(real_plan)
    async with contextlib.AsyncExitStack() as resources:
        engine = await resources.enter_async_context(Engine(real_plan))
        socket.connect(real_plan.endpoint)
        running = asyncio.create_task(worker.run(socket))
        await until(lambda: engine.health.status == "ok")
        app = make_app(engine, tokenizer, template, real_plan, keepalive_seconds=0.05)
        url = await resources.enter_async_context(listening(app, port=0))
        yield await resources.enter_async_context(aiohttp.ClientSession(url)), engine, worker
        running.cancel()
    context.destroy(linger=0)


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


async def complete(client, **fields):
    async with client.post(COMPLETION, json={"prompt": "hi", **fields}) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def is_empty(engine):
    stats = engine.stats()
    return (stats.running, stats.waiting) == (0, 0) and stats.pages_free == stats.pages_total


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_leaves_during_prefill(stack, streams, n):
    client, engine, worker = stack
    worker.go.clear()
    body = {"prompt": "a" * 200, "stream": streams, "n": n}
    request = asyncio.create_task(client.post(COMPLETION, json=body))
    await until(lambda: worker.waits)
    if streams:
        (await request).close()
    else:
        request.cancel()
    await until(lambda: is_empty(engine))
    worker.go.set()
    answer = await asyncio.wait_for(complete(client, max_tokens=3), 5)
    assert answer["choices"][0]["text"] == "xxx"


@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_leaves_during_decode(stack, n):
    client, engine, worker = stack
    body = {"prompt": "a", "stream": True, "n": n, "max_tokens": -1}
    response = await client.post(COMPLETION, json=body)
    await response.content.readline()
    response.close()
    await until(lambda: is_empty(engine))
    before = len(worker.steps)
    await complete(client, max_tokens=3)
    released = [slot for step in worker.steps[max(0, before - 2) :] for slot in step.release]
    assert len(released) >= n


async def test_a_queued_client_that_leaves_disturbs_nobody(stack):
    client, engine, worker = stack
    worker.go.clear()
    fields = [{"max_tokens": 5}, {"max_tokens": 7}, {"max_tokens": 9}, {"max_tokens": 11}]
    tasks = [asyncio.create_task(complete(client, **field)) for field in fields]
    await until(lambda: engine.stats().running == SLOTS and engine.stats().waiting == 2)
    tasks[2].cancel()
    await until(lambda: engine.stats().waiting == 1)
    worker.go.set()
    answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    texts = [answers[i]["choices"][0]["text"] for i in (0, 1, 3)]
    assert texts == ["x" * 5, "x" * 7, "x" * 11]
    assert is_empty(engine)


async def test_comments_while_a_prompt_is_computed(stack, parse):
    client, _, worker = stack
    worker.go.clear()
    body = {"prompt": "a" * 200, "stream": True, "max_tokens": 2}
    async with client.post(COMPLETION, json=body) as response:
        assert await response.content.readline() == b": keep-alive\n"
        assert not worker.steps
        worker.go.set()
        rest = await response.read()
    assert parse(rest.removeprefix(b"\n"))[-1] == "[DONE]"


async def test_choices_take_turns(stack, parse):
    client, _, worker = stack
    body = {"prompt": "a", "stream": True, "n": 2, "max_tokens": 6}
    worker.go.clear()
    async with client.post(COMPLETION, json=body) as response:
        worker.go.set()
        *chunks, done = parse(await response.read())
    assert done == "[DONE]"
    texts = ["", ""]
    for chunk in chunks:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == ["x" * 6] * 2
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order)


async def test_more_choices_than_slots(stack):
    client, engine, _ = stack
    answer = await complete(client, n=5, max_tokens=4)
    assert [choice["text"] for choice in answer["choices"]] == ["xxxx"] * 5
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 20
    assert is_empty(engine)


async def test_a_prompt_that_leaves_room_for_one_token(stack, plan):
    client, _, _ = stack
    answer = await complete(client, prompt=[65] * (plan.context - 1), max_tokens=10**9)
    assert answer["choices"][0] == CUT


@pytest.mark.parametrize("count", [1, 5])
async def test_the_slot_of_an_answer_that_has_left_it(stack, count):
    client, _, _ = stack
    body = {"prompt": "a", "n_predict": count, "n": 2}
    async with client.post("/completion", json=body) as response:
        answers = await response.json()
    assert sorted(answer["id_slot"] for answer in answers) == [0, 1]
    async with client.get("/slots") as response:
        assert not any(slot["is_processing"] for slot in await response.json())
