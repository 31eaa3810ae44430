"""Engine: the gateway's side of the workers. Owns the ROUTER socket and the scheduler.

Event-driven: whenever a request arrives or a Result comes, Steps leave until as many are in flight
as the Plan allows. A lost worker sends every running request back to its known tokens; open streams
go on when a worker is ready again. Knows token ids only: no text, no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from voltapile.gateway.request import Chunk, Refused, Request
from voltapile.topology.plan import Plan
from voltapile.workers.protocol import Sampling, Want

__all__ = ["Chunk", "Engine", "EngineStats", "EngineUnavailable", "Health", "Refused", "Stream"]


class EngineUnavailable(Exception):
    """No worker can take new requests now (HTTP 503). retry_after: seconds."""

    def __init__(self, reason: str, retry_after: int = 5) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass(frozen=True)
class Health:
    status: str  # "loading" | "ok" | "failed"
    stage: str = ""  # while loading
    fraction: float = 0.0
    reason: str = ""  # why it failed, or why it is loading again


@dataclass
class EngineStats:
    """Counters for /metrics; a snapshot from Engine.stats()."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    restarts: int = 0
    step_seconds: float = 0.0  # of the last step, by the worker's clock
    busy_seconds: float = 0.0  # sum of all steps' seconds
    running: int = 0
    waiting: int = 0
    pages_free: int = 0
    pages_total: int = 0


class Stream:
    """An asynchronous iterator of Chunk; the last one has a finish. Chunks that nobody took yet
    are merged, so a slow reader costs nothing."""

    request: Request

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        raise NotImplementedError

    def cancel(self) -> None:
        """The reader has left: slot and pages are free within one step. Safe to call always."""
        raise NotImplementedError


class Engine:
    """async with Engine(plan) as engine: ..."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    async def __aenter__(self) -> Self:
        raise NotImplementedError

    async def __aexit__(self, *exc: object) -> None:
        raise NotImplementedError

    def submit(self, prompt: list[int], sampling: Sampling, want: Want | None = None) -> Stream:
        """Start a generation. Raises Refused or EngineUnavailable. sampling.max_position is
        len(prompt) + max_tokens; it is cut to the context."""
        raise NotImplementedError

    @property
    def health(self) -> Health:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        raise NotImplementedError
