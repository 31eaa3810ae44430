"""Metrics: what /metrics tells Prometheus; one registry for each application.

Counters of the engine are read when somebody asks, so that a token costs nothing here. It knows
neither HTTP nor the scheduler: others call observe methods or are read through EngineStats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from voltapile.gateway.engine import EngineStats

Memory = dict[int, dict[str, tuple[int, int]]]  # rank -> purpose -> planned, allocated bytes

CONTENT_TYPE = CONTENT_TYPE_LATEST
LAG_INTERVAL = 1.0  # seconds between two looks at the event loop

_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
_LAG = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)

# field of EngineStats, metric, what it says
_COUNTERS = (
    ("requests", "requests_submitted", "Generations that the engine took on"),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of all generations"),
    ("cached_tokens", "cached_prompt_tokens", "Of those, the ones found in the prefix cache"),
    ("computed_tokens", "computed_prompt_tokens", "Those of answered prompts that were not"),
    ("generated_tokens", "generated_tokens", "Tokens generated"),
    ("preemptions", "preemptions", "Generations sent back to wait for pages"),
    ("steps", "steps", "Steps run by the workers"),
    ("restarts", "worker_restarts", "Times that a worker was started again"),
    ("busy_seconds", "busy_seconds", "Time that the workers spent on steps"),
)
_GAUGES = (
    ("running", "requests_running", "Generations in a slot"),
    ("waiting", "requests_waiting", "Generations without a slot"),
    ("pages_free", "pages_free", "Cache pages that nobody holds"),
    ("pages_total", "pages_total", "Cache pages in all"),
    ("step_seconds", "last_step_seconds", "Time of the last step, by the worker's clock"),
)
# The same under names that dashboards of llama-server and vLLM look for.
_ALSO_COUNTERS = (
    ("generated_tokens", "llamacpp:tokens_predicted"),
    ("steps", "llamacpp:n_decode"),
    ("computed_tokens", "llamacpp:prompt_tokens"),
    ("prompt_tokens", "vllm:prompt_tokens"),
    ("generated_tokens", "vllm:generation_tokens"),
    ("preemptions", "vllm:num_preemptions"),
)
_ALSO_GAUGES = (
    ("running", "llamacpp:requests_processing"),
    ("waiting", "llamacpp:requests_deferred"),
    ("running", "vllm:num_requests_running"),
    ("waiting", "vllm:num_requests_waiting"),
)


class Metrics:
    """See the module. stats: Engine.stats; memory: Engine.memory."""

    def __init__(
        self, stats: Callable[[], EngineStats], memory: Callable[[], Memory] = dict
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(stats, memory))
        ProcessCollector(registry=self.registry)
        self._requests = Counter(
            "voltapile_http_requests",
            "HTTP requests answered",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self._generations = Counter(
            "voltapile_generations",
            "Generations ended, by reason",
            ["finish"],
            registry=self.registry,
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token",
            _FIRST_TOKEN,
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds", "Mean time of a token after the first", _PER_TOKEN
        )
        self._lag = self._histogram(
            "event_loop_lag_seconds", "How late the gateway's event loop ran a timer", _LAG
        )

    def request_done(self, endpoint: str, status: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def generation_done(self, finish: str, tokens: int, seconds: float) -> None:
        """seconds: from the first token to the last."""
        self._generations.labels(finish).inc()
        if tokens > 1:
            self._per_token.observe(seconds / (tokens - 1))

    async def watch_loop(self) -> None:
        """Measures the event loop's lag until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            self._lag.observe(max(0.0, loop.time() - due))

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"voltapile_{name}", text, buckets=buckets, registry=self.registry)


class _EngineCollector(Collector):
    """Reads the engine at the moment of a scrape."""

    def __init__(self, stats: Callable[[], EngineStats], memory: Callable[[], Memory]) -> None:
        self._stats, self._memory = stats, memory

    def describe(self) -> Iterator[Metric]:
        return iter(())  # do not ask the engine when this is registered

    def collect(self) -> Iterator[Metric]:
        stats = vars(self._stats())
        for field, name, text in _COUNTERS:
            yield CounterMetricFamily(f"voltapile_{name}", text, value=stats[field])
        for field, name, text in _GAUGES:
            yield GaugeMetricFamily(f"voltapile_{name}", text, value=stats[field])
        yield from _also(stats)
        yield self._memory_gauge()

    def _memory_gauge(self) -> Metric:
        gauge = GaugeMetricFamily(
            "voltapile_memory_bytes",
            "Memory of a rank by purpose, as planned and as allocated",
            labels=["rank", "purpose", "kind"],
        )
        for rank, purposes in self._memory().items():
            for purpose, (planned, allocated) in purposes.items():
                gauge.add_metric([str(rank), purpose, "planned"], planned)
                gauge.add_metric([str(rank), purpose, "allocated"], allocated)
        return gauge


def _also(stats: dict[str, float]) -> Iterator[Metric]:
    """For other servers' dashboards."""
    for field, name in _ALSO_COUNTERS:
        yield CounterMetricFamily(name, f"See {field}", value=stats[field])
    for field, name in _ALSO_GAUGES:
        yield GaugeMetricFamily(name, f"See {field}", value=stats[field])
    total = stats["pages_total"]
    used = 1 - stats["pages_free"] / total if total else 0.0
    yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Of the cache's pages, 0 to 1", value=used)
