"""The Steps of a bench: streams whose prompts are read and that then generate together.

Plays the gateway for one Engine: pages, rows, one Step submitted ahead. Tells seconds, and how long
a GPU pauses between recorded steps; knows nothing of what is printed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from voltapile.gateway.cli.bench_depth import fill_caches
from voltapile.shm.gguf import Gguf
from voltapile.topology.plan import Plan
from voltapile.workers.engine import Engine
from voltapile.workers.protocol import Result, Row, Sampling, Step

CHUNK = 64  # prompts are cut at multiples of it, as the gateway does


class Driven(Protocol):
    """An Engine, or processes that are driven like one."""

    plan: Plan
    gguf: Gguf

    def submit(self, step: Step) -> Any: ...

    def collect(self, pending: Any) -> Result: ...

    def run(self, step: Step) -> Result: ...

    def forget(self) -> None: ...


class Load:
    """`streams` requests of `engine` that generate at most `count` tokens each, behind `depth`
    positions of random keys and values."""

    def __init__(
        self, engine: Driven, streams: int, count: int, temperature: float, depth: int = 0
    ) -> None:
        self.engine, self.streams, self.count, self.depth = engine, streams, count, depth
        self.sampling = Sampling(temperature=temperature, seed=1)
        if depth:
            assert isinstance(engine, Engine), "one rank"
            for slot in range(streams):
                fill_caches(engine, slot, self._pages(slot, depth), depth)

    def run(self, prompts: np.ndarray, count: int = 0) -> tuple[float, float]:
        """Seconds to the first token of all prompts [streams, P], and of `count` more of each."""
        count = count or self.count
        began = time.perf_counter()
        run_ahead(self.engine, list(self._prefill(prompts, count)))
        middle = time.perf_counter()
        slots = range(self.streams)
        decode = [Step(id=i, rows=[Row(slot=slot) for slot in slots]) for i in range(count)]
        run_ahead(self.engine, decode)
        ended = time.perf_counter()
        self.engine.run(Step(id=0, release=list(slots)))
        return middle - began, ended - middle

    def _prefill(self, prompts: np.ndarray, count: int) -> Iterator[Step]:
        """Prompts one behind the other, in Steps as large as the Plan allows."""
        most = max(CHUNK, self.engine.plan.batch_tokens // CHUNK * CHUNK)
        rows: list[Row] = []
        for slot, prompt in enumerate(np.asarray(prompts, np.int32)):
            start = 0
            while start < len(prompt):
                room = (most - sum(len(row.tokens) for row in rows)) // CHUNK * CHUNK
                if not room:
                    yield Step(id=0, rows=rows)
                    rows, room = [], most
                tokens = prompt[start : start + room]
                row = Row(slot=slot, start=self.depth + start, tokens=tokens)
                row.sample = start + room >= len(prompt)
                if start == 0:
                    row.sampling = self.sampling
                    row.pages = self._pages(slot, self.depth + len(prompt) + count + 1)
                rows.append(row)
                start += room
        yield Step(id=0, rows=rows)

    def _pages(self, slot: int, tokens: int) -> list[list[int]]:
        """Each stream has its share of every pool; in a window group pages come round again."""
        found = []
        for group in self.engine.plan.caches:
            share, need = (group.pages - 1) // self.streams, -(-tokens // group.page_tokens)
            if share < need and not group.window:
                raise ValueError(
                    f"the plan has pages for {share * group.page_tokens} tokens of each of "
                    f"{self.streams} streams, not for {tokens}: memory is too small"
                )
            found.append([1 + slot * share + i % share for i in range(need)])
        return found


def run_ahead(engine: Driven, steps: Sequence[Step]) -> None:
    """One Step is submitted while the one before it is computed, as a worker does. Raises
    RuntimeError where a stream ends before its time: what comes after would be as fast as behind
    no context, and would take the same experts for all."""
    before = None
    for step in steps:
        pending = engine.submit(step)
        if before is not None:
            check(engine.collect(before))
        before = pending
    if before is not None:
        check(engine.collect(before))


def check(result: Result) -> None:
    for row in result.rows:
        if not row.tokens or row.finish:
            raise RuntimeError(f"stream {row.slot} ended: {row.error or row.finish or 'no token'}")


class Watched:
    """A recorded step that notes when the GPU begins and ends it."""

    def __init__(self, graph: Any, device: Any, times: list[tuple[Any, Any]]) -> None:
        self._graph, self._device, self._times = graph, device, times

    def replay(self) -> None:
        began = self._device.event()
        self._graph.replay()
        self._times.append((began, self._device.event()))


def gpu_idle(load: Load, prompts: np.ndarray) -> float | None:
    """The share of time that a GPU has no recorded step to run while streams generate: from the end
    of each to the begin of the next. None without a GPU, or where the steps are not recorded."""
    engine = load.engine
    if not isinstance(engine, Engine):
        return None
    device, graphs = getattr(engine.ops, "device", None), dict(engine.graphs)
    if device is None or load.streams not in graphs:
        return None
    times: list[tuple[Any, Any]] = []
    engine.graphs = {rows: Watched(graph, device, times) for rows, graph in graphs.items()}
    try:
        load.run(prompts)
    finally:
        engine.graphs = graphs
    if len(times) < 2:
        return None
    idle = sum(device.seconds_between(a[1], b[0]) for a, b in pairwise(times))
    return float(idle / device.seconds_between(times[0][0], times[-1][1]))
