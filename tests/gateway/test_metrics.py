import asyncio
import contextlib

from prometheus_client.parser import text_string_to_metric_families
from voltapile.gateway import metrics as module
from voltapile.gateway.engine import EngineStats
from voltapile.gateway.metrics import Metrics


def read(metrics):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_the_engine_is_read_at_every_scrape():
    stats = EngineStats(steps=3, waiting=1)
    metrics = Metrics(lambda: stats)
    assert read(metrics)["voltapile_steps_total",] == 3
    stats.steps = 4
    assert read(metrics)["voltapile_steps_total",] == 4
    assert read(metrics)["voltapile_requests_waiting",] == 1


def test_names_that_other_servers_dashboards_look_for():
    stats = EngineStats(
        running=2, waiting=1, prompt_tokens=9, computed_tokens=5, generated_tokens=5
    )
    stats.pages_total, stats.pages_free = 4, 1
    samples = read(Metrics(lambda: stats))
    for prefix in ("llamacpp:requests_processing", "vllm:num_requests_running"):
        assert samples[prefix,] == 2
    assert samples["llamacpp:prompt_tokens_total",] == 5
    assert samples["llamacpp:tokens_predicted_total",] == 5
    assert samples["vllm:prompt_tokens_total",] == 9
    assert samples["vllm:kv_cache_usage_perc",] == 0.75
    assert read(Metrics(EngineStats))["vllm:kv_cache_usage_perc",] == 0


def test_every_counter_of_the_engine_is_shown():
    fields = {field for field, _, _ in module._COUNTERS + module._GAUGES}
    assert fields == set(vars(EngineStats()))


def test_generations():
    metrics = Metrics(EngineStats)
    metrics.generation_done("stop", 11, 1.0)
    metrics.generation_done("length", 1, 0.0)  # one token has no time after the first
    samples = read(metrics)
    assert samples["voltapile_generations_total", "stop"] == 1
    assert samples["voltapile_generations_total", "length"] == 1
    assert samples["voltapile_time_per_output_token_seconds_count",] == 1
    assert samples["voltapile_time_per_output_token_seconds_sum",] == 0.1


def test_two_applications_do_not_share_numbers():
    first, second = Metrics(EngineStats), Metrics(EngineStats)
    first.request_done("/x", 200)
    assert ("voltapile_http_requests_total", "/x", "200") not in read(second)


async def test_the_event_loops_lag(monkeypatch):
    monkeypatch.setattr(module, "LAG_INTERVAL", 0.01)
    metrics = Metrics(EngineStats)
    task = asyncio.create_task(metrics.watch_loop())
    await asyncio.sleep(0.05)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert read(metrics)["voltapile_event_loop_lag_seconds_count",] >= 1
