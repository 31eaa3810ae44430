"""The status view in a browser: what /status says, in words, again each second."""

import msgspec
import pytest
from voltapile.gateway.engine import EngineStats, Health
from voltapile.topology.plan import Placement, RankPlan
from voltapile.topology.share import Share

pytestmark = pytest.mark.slow

SHARE = Share(layers=[0, 1], heads=(0, 1), kv_heads=(0, 1), head_map=[0], ffn=(0, 1), vocab=(0, 1))
VIEW = "document.getElementById('status').innerText"


@pytest.fixture
def plan(plan):
    rank = RankPlan(
        rank=0, share=SHARE, page_bytes=[], device="cuda:0", node=1, cpus=[0, 1, 2], threads=3,
        memory={"weights": 3 << 30, "kv": 5 << 20}, mapped_bytes=0,
    )  # fmt: skip
    weights = Placement(tier="vram", ranks=[0], bytes=3 << 30, type="F16")
    return msgspec.structs.replace(
        plan, ranks=[rank], tensors={"a": weights}, shared={"b": 7 << 20}
    )


async def test_what_it_shows(tab, engine):
    await tab.js("location.hash = '#status'")
    await tab.until(f"{VIEW}.includes('Memory as planned')")
    shown = await tab.js(VIEW)
    for text in ("tiny/model (llama)", "ready", "cuda:0", "layers 0–1", "3.0 GiB", "5.0 MiB",
                 "Weights: 3.0 GiB in VRAM", "host, shared", "7.0 MiB", "None now."):  # fmt: skip
        assert text in shown, text
    assert await tab.js("document.getElementById('chat').checkVisibility()") is False


async def test_speed_requests_and_progress(tab, engine):
    engine.say("ab", finish="")
    await tab.say("What?")
    await tab.until("document.querySelector('.assistant .content')?.innerText === 'ab'")
    engine.streams[0].request.computed = 5
    count = iter(range(0, 10**6, 100))
    engine.stats = lambda: EngineStats(running=1, waiting=2, generated_tokens=next(count))
    await tab.js("location.hash = '#status'")
    await tab.until(f"/Generating\\s+[1-9]\\d+\\.\\d tokens/.test({VIEW})")
    shown = await tab.js(VIEW)
    assert "1 running, 2 waiting" in shown
    assert "waiting" in await tab.text("tbody tr")  # this stream has no slot
    assert await tab.js("document.querySelector('progress').value") == 5
    engine.streams[0].request.slot = 2
    await tab.until(f"{VIEW}.includes('answering')")


async def test_it_asks_only_while_it_is_shown(tab):
    await tab.js("location.hash = '#status'")
    await tab.until(f"{VIEW}.includes('Memory as planned')")
    await tab.click("#to-chat")
    await tab.until("document.getElementById('chat').checkVisibility()")
    tab.requests.clear()
    await tab.js("new Promise((done) => setTimeout(done, 1300))")
    assert not [url for url in tab.requests if url.endswith("/status")]


async def test_a_model_that_loads_or_failed(tab, engine):
    engine.health = Health("loading", "weights", 0.5, "rank 0 was killed")
    await tab.js("location.hash = '#status'")
    await tab.until(f"{VIEW}.includes('loading: weights 50 % (rank 0 was killed)')")
    engine.health = Health("failed", reason="no room")
    await tab.until(f"{VIEW}.includes('failed: no room')")
