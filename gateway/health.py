"""What the engine tells of itself: whether it can take requests, and what it has counted.

Records alone. Knows neither workers nor HTTP, which shows them.
"""

from __future__ import annotations

from dataclasses import dataclass

from voltapile.gateway.crew import Progress

RETRY_SECONDS = 5  # what a client that gets 503 is told


class EngineUnavailable(Exception):
    """No worker can take new requests now (HTTP 503). retry_after: seconds."""

    def __init__(self, reason: str, retry_after: int = RETRY_SECONDS) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass(frozen=True)
class Health:
    status: str  # "loading" | "ok" | "failed"
    stage: str = ""  # while loading
    fraction: float = 0.0
    reason: str = ""  # why it failed, or why it is loading again
    ranks: tuple[Progress, ...] = ()  # while loading, where there are several


@dataclass
class EngineStats:
    """Counters for /metrics; a snapshot from Engine.stats()."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0  # of the prompts, not computed again
    computed_tokens: int = 0  # of the prompts that have been answered, those that were computed
    preemptions: int = 0
    steps: int = 0
    restarts: int = 0
    step_seconds: float = 0.0  # of the last step, by the worker's clock
    busy_seconds: float = 0.0  # sum of all steps' seconds
    running: int = 0
    waiting: int = 0
    pages_free: int = 0
    pages_total: int = 0
