"""Rows that a grammar or a budget binds wait for what binds them, and run ahead of nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from voltapile.gateway.request import Request
from voltapile.gateway.scheduler import Scheduler
from voltapile.gateway.thought import ThoughtLimit
from voltapile.topology.plan import CacheGroup, Plan
from voltapile.workers.protocol import Result, Row, Sampled, Sampling, Step

FIRST, SECOND = np.array([1], np.uint32), np.array([2], np.uint32)


@pytest.fixture
def scheduler() -> Scheduler:
    cache = CacheGroup(
        kind="full", layers=[0], kv_heads=1, key_dim=8, value_dim=8, window=0, key_type="f16",
        value_type="f16", page_tokens=4, page_bytes=1, pages=40,
    )  # fmt: skip
    return Scheduler(Plan(
        id="p", model=["m"], alias="m", architecture="llama", backend="cpu", endpoint="",
        context=64, slots=3, batch_tokens=128, buckets=[1], steps_in_flight=2, answer_rank=0,
        ranks=[], caches=[cache], tensors={},
    ))  # fmt: skip


def add(scheduler: Scheduler, guide: Any = None, limit: ThoughtLimit | None = None) -> Request:
    request = scheduler.add([1, 2, 3], Sampling(max_position=30))
    request.bind(guide, limit)
    return request


def row_of(step: Step | None) -> Row:
    assert step is not None
    [row] = step.rows
    return row


def answer(scheduler: Scheduler, step: Step | None, token: int) -> None:
    assert step is not None
    rows = [Sampled(slot=row.slot, tokens=[token]) for row in step.rows if row.sample]
    scheduler.apply(Result(id=step.id, rows=rows))


def test_a_row_waits_for_its_mask(scheduler: Scheduler) -> None:
    request = add(scheduler, SimpleNamespace(mask=FIRST))
    step = scheduler.schedule()
    assert row_of(step).mask is FIRST
    assert scheduler.schedule() is None
    answer(scheduler, step, 7)
    assert scheduler.schedule() is None
    request.mask = SECOND
    assert row_of(scheduler.schedule()).mask is SECOND


def test_others_run_ahead_meanwhile(scheduler: Scheduler) -> None:
    add(scheduler, SimpleNamespace(mask=FIRST))
    free = add(scheduler)
    step = scheduler.schedule()
    assert step is not None
    assert len(step.rows) == 2
    assert row_of(scheduler.schedule()).slot == free.slot


def test_a_lost_worker_takes_no_mask_away(scheduler: Scheduler) -> None:
    request = add(scheduler, SimpleNamespace(mask=FIRST))
    answer(scheduler, scheduler.schedule(), 7)
    request.mask = SECOND
    assert row_of(scheduler.schedule()).mask is SECOND
    scheduler.reset()
    rows = [row_of(scheduler.schedule()), row_of(scheduler.schedule())]
    assert [row.tokens.tolist() for row in rows] == [[1, 2, 3], [7]]
    assert [row.mask is SECOND for row in rows] == [False, True]


def test_a_lost_worker_while_a_mask_is_computed(scheduler: Scheduler) -> None:
    request = add(scheduler, SimpleNamespace(mask=FIRST))
    answer(scheduler, scheduler.schedule(), 7)
    scheduler.reset()
    rows = []
    while (step := scheduler.schedule()) is not None:
        rows += step.rows
        scheduler.apply(Result(id=step.id))
    assert all(not row.sample for row in rows)
    request.mask = SECOND
    assert row_of(scheduler.schedule()).mask is SECOND


def test_a_budget_waits_only_where_it_is_due(scheduler: Scheduler) -> None:
    add(scheduler, limit=ThoughtLimit(2, (), (9,), b"end", bytes))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert row_of(first).forced == row_of(second).forced == -1
    answer(scheduler, first, 50)
    assert scheduler.schedule() is None
    answer(scheduler, second, 51)
    assert row_of(scheduler.schedule()).forced == 9
