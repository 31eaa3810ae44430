"""GET /status: what the Plan says, what the engine says, and what each request does."""

import asyncio

import msgspec
import pytest
from voltapile.gateway.api.status import memory, weights
from voltapile.gateway.crew import Progress
from voltapile.gateway.engine import Health
from voltapile.topology.plan import Placement, Plan, RankPlan
from voltapile.topology.share import Share

NOTHING = Share(
    layers=[0, 1], heads=(0, 1), kv_heads=(0, 1), head_map=[0], ffn=(0, 1), vocab=(0, 1)
)


def rank(number: int, device: str, **fields) -> RankPlan:
    usual = {
        "page_bytes": [], "node": 0, "cpus": [0, 1], "threads": 2, "mapped_bytes": 0,
        "memory": {"weights": 100, "kv": 10},
    }  # fmt: skip
    return RankPlan(rank=number, share=NOTHING, device=device, **(usual | fields))


def placed(tier: str, nbytes: int, ranks: tuple[int, ...] = (0,)) -> Placement:
    return Placement(tier=tier, ranks=list(ranks), bytes=nbytes, type="F16")


@pytest.fixture
def plan(plan: Plan) -> Plan:
    """The one that is served: two GPUs, and all tiers."""
    ranks = [rank(0, "cuda:0", host={"reserve": 5}), rank(1, "cuda:1")]
    tensors = {
        "a": placed("vram", 150), "b": placed("vram", 50, (0, 1)), "c": placed("pinned", 7),
        "d": placed("mapped", 3), "unused": placed("mapped", 1000, ()),
    }  # fmt: skip
    return msgspec.structs.replace(plan, ranks=ranks, tensors=tensors, shared={"embedding": 7})


def test_memory_by_place_and_tier(plan):
    found = [(row["name"], row["tier"], row["ranks"], row["bytes"]) for row in memory(plan)]
    assert found == [
        ("cuda:0", "vram", [0], {"weights": 100, "kv": 10}),
        ("host, rank 0", "host", [0], {"reserve": 5}),
        ("cuda:1", "vram", [1], {"weights": 100, "kv": 10}),
        ("host, shared", "host", [0, 1], {"embedding": 7}),
        ("model file, mapped", "mapped", [0, 1], {"weights": 3}),
    ]
    assert weights(plan) == {"vram": 200, "pinned": 7, "mapped": 3}


def test_memory_of_cpu_ranks(plan):
    ranks = [rank(0, "cpu"), rank(1, "cpu")]
    two = msgspec.structs.replace(plan, ranks=ranks, tensors={}, shared={})
    assert [(row["name"], row["tier"]) for row in memory(two)] == [
        ("host, rank 0", "host"),
        ("host, rank 1", "host"),
    ]


async def ask(client):
    async with client.get("/status") as response:
        assert response.status == 200
        return await response.json()


async def test_what_is_served(client):
    body = await ask(client)
    assert (body["status"], body["model"], body["slots"]) == ("ok", "tiny/model", 4)
    assert body["counters"]["pages_total"] == 7
    assert body["weights"]["vram"] == 200
    assert len(body["memory"]) == 5
    assert body["requests"] == []
    assert body["ranks"][0]["layers"] == [0, 1]
    assert [each["allocated"] for each in body["ranks"]] == [{}, {"kv": 199}]


@pytest.mark.parametrize(
    ("health", "stages"),
    [
        (Health("ok"), [("ready", 1.0), ("ready", 1.0)]),
        (Health("loading", "weights", 0.5), [("weights", 0.5), ("weights", 0.5)]),
        (
            Health("loading", ranks=(Progress(0, "ready", 1.0), Progress(1, "weights", 0.25))),
            [("ready", 1.0), ("weights", 0.25)],
        ),
        (Health("failed", reason="no room"), [("failed", 0.0), ("failed", 0.0)]),
    ],
)
async def test_stages_of_ranks(client, engine, health, stages):
    engine.health = health
    body = await ask(client)
    assert (body["status"], body["reason"]) == (health.status, health.reason)
    assert [(each["stage"], each["fraction"]) for each in body["ranks"]] == stages


async def test_requests_that_run_and_wait(client, engine):
    engine.say("ab", finish="")
    asked = {"prompt": ["one", "second"], "stream": True, "max_tokens": 9}
    async with client.post("/v1/completions", json=asked) as response:
        await response.content.readline()
        engine.streams[1].request.enter(3)
        await asyncio.sleep(0.05)
        found = (await ask(client))["requests"]
    waiting, running = sorted(found, key=lambda each: each["prompt_tokens"])
    assert (waiting["state"], running["state"]) == ("waiting", "answer")
    assert running["slot"] == 3
    assert (running["prompt_tokens"], running["generated_tokens"]) == (6, 2)
    assert running["most_tokens"] == 9
    assert running["prompt_seconds"] >= 0
