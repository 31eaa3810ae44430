import pytest
from prometheus_client.parser import text_string_to_metric_families
from voltapile.gateway.crew import Progress
from voltapile.gateway.engine import EngineUnavailable, Health


@pytest.mark.parametrize(
    ("health", "status", "body"),
    [
        (Health("ok"), 200, {"status": "ok"}),
        (
            Health("loading", stage="weights", fraction=0.5),
            503,
            {"status": "loading", "stage": "weights", "fraction": 0.5},
        ),
        (
            Health(
                "loading",
                "weights (rank 1 of 2)",
                0.25,
                "rank 1 ended",
                (
                    Progress(0, "ready", 1.0),
                    Progress(1, "weights", 0.25),
                ),
            ),
            503,
            {
                "status": "loading",
                "stage": "weights (rank 1 of 2)",
                "fraction": 0.25,
                "reason": "rank 1 ended",
                "ranks": [
                    {"rank": 0, "stage": "ready", "fraction": 1.0},
                    {"rank": 1, "stage": "weights", "fraction": 0.25},
                ],
            },
        ),
        (
            Health("failed", reason="no memory"),
            503,
            {"status": "failed", "reason": "no memory"},
        ),
    ],
)
async def test_health(client, engine, health, status, body):
    engine.health = health
    async with client.get("/health") as response:
        assert (response.status, await response.json()) == (status, body)
        assert ("Retry-After" in response.headers) == (status == 503)


async def test_an_unavailable_engine_is_503(client, engine):
    engine.refusal = EngineUnavailable("the model is loading", 3)
    for stream in (False, True):
        body = {"prompt": "hi", "stream": stream}
        async with client.post("/v1/completions", json=body) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "3"
            assert (await response.json())["error"]["message"] == "the model is loading"


async def test_metrics_parse_and_count(client, post):
    await post("/v1/completions", {"prompt": "hi"})
    await post("/v1/completions", {"prompt": 5})
    await client.get("/nowhere")
    async with client.get("/metrics") as response:
        assert response.content_type == "text/plain"
        text = await response.text()
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["voltapile_http_requests_total", "/v1/completions", "200"] == 1
    assert samples["voltapile_http_requests_total", "/v1/completions", "400"] == 1
    assert samples["voltapile_http_requests_total", "404", "unknown"] == 1
    assert samples["voltapile_generations_total", "stop"] == 1
    assert samples["voltapile_time_to_first_token_seconds_count",] == 1
    assert samples["voltapile_requests_running",] == 2
    assert samples["voltapile_pages_total",] == 7
    assert samples["voltapile_memory_bytes", "1", "kv", "planned"] == 200
    assert samples["voltapile_memory_bytes", "1", "allocated", "kv"] == 199


async def test_metrics_may_be_off(serve):
    client = await serve(metrics=False)
    async with client.get("/metrics") as response:
        assert response.status == 404
