"""States are kept at whole blocks, found by what comes before them, and never read too late."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from voltapile.gateway.request import Request
from voltapile.gateway.scheduler import Scheduler
from voltapile.topology.plan import CacheGroup, Plan
from voltapile.workers.protocol import Result, Sampled, Sampling, Step, Want, decode, encode
from voltapile.workers.rounds import Rounds

PAGE, VOCAB = 4, 7


def make_plan(checkpoints: int = 9, pages: int = 60, slots: int = 3, every: int = 16) -> Plan:
    cache = CacheGroup(
        kind="full", layers=[0], kv_heads=1, key_dim=8, value_dim=8, window=0, key_type="f16",
        value_type="f16", page_tokens=PAGE, page_bytes=1, pages=pages,
    )  # fmt: skip
    return Plan(
        id="p", model=["m"], alias="m", architecture="qwen35", backend="cpu", endpoint="",
        context=200, slots=slots, batch_tokens=24, buckets=[1], steps_in_flight=2, answer_rank=0,
        ranks=[], caches=[cache], tensors={}, has_states=True, checkpoints=checkpoints,
        checkpoint_tokens=every,
    )  # fmt: skip


def next_token(tokens: tuple[int, ...], seed: int) -> int:
    return random.Random(hash((tokens, seed))).randrange(VOCAB)


def alone(prompt: list[int], seed: int, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tuple(tokens), seed))
    return tokens[len(prompt) :]


@dataclass
class Slot:
    sampling: Sampling = field(default_factory=Sampling)
    pages: list[int] = field(default_factory=list)
    last: int = -1
    state: tuple[int, ...] = ()  # all tokens that it has seen
    is_over: bool = False


@dataclass
class Worker:
    """Layers with states and pages: a token is chosen by the state, and pages must agree."""

    plan: Plan
    slots: dict[int, Slot] = field(default_factory=dict)
    kept: dict[int, tuple[int, ...]] = field(default_factory=dict)
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    computed: int = 0

    def run(self, step: Step) -> Result:
        for slot in step.release:
            self.slots[slot].pages = []
        for copy in step.copy:
            if copy.kind == "checkpoint":
                assert 0 < copy.target <= self.plan.checkpoints
                self.kept[copy.target] = self.slots[copy.source].state
            else:
                self.slots.setdefault(copy.target, Slot()).state = self.kept[copy.source]
        rows = [self.row(row) for row in step.rows]
        return Result(id=step.id, seconds=0.01, rows=[row for row in rows if row is not None])

    def row(self, row: Any) -> Sampled | None:
        slot = self.slots.setdefault(row.slot, Slot())
        if row.sampling is not None:
            slot.sampling, slot.is_over = row.sampling, False
            slot.state = slot.state if row.start else ()
        slot.pages += row.pages[0] if row.pages else []
        for token in row.tokens.tolist() or [slot.last]:
            if not slot.is_over:
                assert not len(row.tokens) or len(slot.state) >= row.start
                at = len(slot.state)
                self.memory[slot.pages[at // PAGE], at % PAGE] = token
                self.computed += 1
            slot.state += (token,)
        if len(row.tokens):
            assert len(slot.state) == row.start + len(row.tokens), "the state is of another place"
        if not slot.is_over:
            for at, token in enumerate(slot.state):
                assert self.memory[slot.pages[at // PAGE], at % PAGE] == token
        if not row.sample:
            return None
        if slot.is_over:
            return Sampled(slot=row.slot)
        slot.last = next_token(slot.state, slot.sampling.seed)
        slot.is_over = len(slot.state) + 1 >= slot.sampling.max_position
        slot.is_over |= slot.last in slot.sampling.stop_ids
        finish = "length" if slot.is_over else ""
        return Sampled(slot=row.slot, tokens=[slot.last], finish=finish)


def one_round(worker: Any, rounds: Rounds) -> Result:
    result: Result = worker.run(rounds.next())
    rounds.settle(result)
    return result


def run(worker: Any, scheduler: Scheduler) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    rounds = Rounds()
    while True:
        while (step := scheduler.schedule()) is not None:
            message = decode([bytes(frame) for frame in encode(step)])
            assert isinstance(message, Step)
            rounds.add(message)
        if not rounds:
            return found
        for request, chunk in scheduler.apply(one_round(worker, rounds)):
            assert chunk.finish != "error", chunk.error
            found.setdefault(request.id, []).extend(chunk.tokens)


def scheduler_of(plan: Plan) -> Scheduler:
    return Scheduler(plan, alignment=8)


def ask(
    worker: Any, scheduler: Scheduler, prompt: list[int], count: int = 3, seed: int = 0
) -> tuple[Request, list[int]]:
    sampling = Sampling(max_position=len(prompt) + count, seed=seed)
    request = scheduler.add(prompt, sampling)
    return request, run(worker, scheduler)[request.id]


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.fixture
def worker() -> Worker:
    return Worker(make_plan())


def test_an_identical_prompt(worker: Worker) -> None:
    scheduler, prompt = scheduler_of(worker.plan), text(45)
    _, first = ask(worker, scheduler, prompt)
    again, second = ask(worker, scheduler, prompt)
    assert first == second == alone(prompt, 0, 3)
    assert again.cached == 40


def test_a_follow_up_turn(worker: Worker) -> None:
    """What was generated need not be computed again, up to the last block that was kept."""
    scheduler, prompt = scheduler_of(worker.plan), text(45)
    _, answer = ask(worker, scheduler, prompt, 50)
    longer = [*prompt, *answer, *text(10, 1)]
    turn, tokens = ask(worker, scheduler, longer)
    assert turn.cached == 64
    assert tokens == alone(longer, 0, 3)


def test_an_edited_last_message() -> None:
    """The words behind a prompt may be others."""
    worker = Worker(make_plan(every=1000))
    scheduler, prompt = scheduler_of(worker.plan), text(45)
    ask(worker, scheduler, prompt)
    edited = [*prompt[:33], *text(12, 1)]
    turn, tokens = ask(worker, scheduler, edited)
    assert turn.cached == 24  # 16 tokens before the end
    assert tokens == alone(edited, 0, 3)


def test_where_texts_part_states_are_kept() -> None:
    """The second text with a beginning finds out that it is shared; the third one profits."""
    worker = Worker(make_plan(every=1000))
    scheduler, common = scheduler_of(worker.plan), text(50)
    cached = []
    for seed in range(1, 4):
        prompt = [*common, *text(60, seed)]
        turn, tokens = ask(worker, scheduler, prompt)
        cached.append(turn.cached)
        assert tokens == alone(prompt, 0, 3)
    assert cached == [0, 0, 48]


def test_prompts_at_once_wait_for_the_first(worker: Worker) -> None:
    scheduler, prompt = scheduler_of(worker.plan), text(45)
    sampling = Sampling(max_position=50)
    requests = [scheduler.add(prompt, sampling) for _ in range(3)]
    found = run(worker, scheduler)
    assert [found[each.id] for each in requests] == [alone(prompt, 0, 5)] * 3
    assert [each.cached for each in requests] == [0, 40, 40]


@pytest.mark.parametrize("checkpoints", [0, 1])
def test_few_checkpoints_or_none(checkpoints: int) -> None:
    worker = Worker(make_plan(checkpoints))
    scheduler, prompt = scheduler_of(worker.plan), text(45)
    for _ in range(2):
        request, tokens = ask(worker, scheduler, prompt)
        assert tokens == alone(prompt, 0, 3)
    assert (request.cached > 0) == (checkpoints > 0)


def test_a_long_prompt_leaves_others_some(worker: Worker) -> None:
    """It takes no more than half of the checkpoints, whatever its length."""
    scheduler = scheduler_of(make_plan(checkpoints=8, every=1))
    request = scheduler.add(text(190), Sampling(max_position=195))
    scheduler.schedule()
    assert len(request.marks) <= 6


def test_a_new_worker_has_no_states(worker: Worker) -> None:
    scheduler, prompt = scheduler_of(worker.plan), text(45)
    ask(worker, scheduler, prompt)
    request = scheduler.add(prompt, Sampling(max_position=60))
    scheduler.schedule()
    scheduler.reset()
    other = Worker(worker.plan)
    other.slots = {slot: Slot() for slot in range(3)}
    assert run(other, scheduler)[request.id] == alone(prompt, 0, 15)


def test_prompt_probabilities_reuse_nothing(worker: Worker) -> None:
    scheduler, prompt = scheduler_of(worker.plan), text(45)
    ask(worker, scheduler, prompt)
    request = scheduler.add(prompt, Sampling(max_position=48), Want(prompt_logprobs=0))
    run(worker, scheduler)
    assert request.cached == 0


def test_history_comes_with_what_is_reused(worker: Worker) -> None:
    """N-grams look at the tokens before."""
    scheduler, prompt = scheduler_of(worker.plan), text(45)
    ask(worker, scheduler, prompt)
    scheduler.add(prompt, Sampling(max_position=48))
    step = scheduler.schedule()
    assert step is not None
    assert step.rows[0].history.tolist() == prompt[:40]
    assert [(copy.kind, copy.target) for copy in step.copy][-1] == ("restore", step.rows[0].slot)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_company(data: st.DataObject) -> None:
    """Whatever is asked, evicted, preempted and cancelled, everybody gets his own tokens."""
    pages, slots = data.draw(st.integers(32, 60)), data.draw(st.integers(1, 4))
    plan = make_plan(data.draw(st.integers(0, 6)), pages, slots, data.draw(st.integers(1, 30)))
    worker, scheduler = Worker(plan), scheduler_of(plan)
    expected: dict[int, list[int]] = {}
    found: dict[int, list[int]] = {}
    rounds = Rounds()
    for turn in range(data.draw(st.integers(1, 12))):
        start = data.draw(st.integers(0, 40))
        prompt = [*text(start), *text(data.draw(st.integers(1, 40)), turn % 3)]
        count = data.draw(st.integers(1, 40))
        stop = data.draw(st.integers(0, 40))
        request = scheduler.add(prompt, Sampling(max_position=len(prompt) + count, seed=turn % 2))
        expected[request.id] = alone(prompt, turn % 2, count)
        for _ in range(data.draw(st.integers(0, 12))):
            if (step := scheduler.schedule()) is not None:
                rounds.add(step)
            if (hold := scheduler.hold()) is not None:
                rounds.hold(hold.step)
            if rounds and data.draw(st.booleans()):
                for done, chunk in scheduler.apply(one_round(worker, rounds)):
                    found.setdefault(done.id, []).extend(chunk.tokens)
        if stop < 5 and scheduler.cancel(request.id):
            del expected[request.id]
    while True:
        while (step := scheduler.schedule()) is not None:
            rounds.add(step)
        if not rounds:
            break
        for done, chunk in scheduler.apply(one_round(worker, rounds)):
            found.setdefault(done.id, []).extend(chunk.tokens)
    assert {id: found[id] for id in expected} == expected
    pool = scheduler.checkpoints.pool
    assert pool is None or pool.free == pool.total
    assert scheduler.pools[0].free == scheduler.pools[0].total


# --- and the real thing ---------------------------------------------------------------------------

EngineFor = Callable[..., Any]
COMMON = text(150, 9)
PROMPTS = [COMMON, COMMON, [*COMMON, *text(100, 1)], [*COMMON[:70], *text(20, 2)], text(64, 3)]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("model", ["qwen35", "qwen4exp"])
def test_company_and_checkpoints_change_no_token(
    mini: Path, engine_for: EngineFor, model: str, backend: str
) -> None:
    path = mini / model / "model-f16.gguf"
    engine = engine_for(path, backend, slots=3, batch_tokens=256, checkpoint_tokens=64)
    assert engine.plan.checkpoints == 96
    expected = []
    for prompt in PROMPTS:
        engine.forget()
        expected.append(ask(engine, Scheduler(engine.plan), prompt, 40)[1])
    small = [msgspec.structs.replace(c, pages=min(c.pages, 7)) for c in engine.plan.caches]
    for caches in (engine.plan.caches, small):
        engine.forget()
        scheduler = Scheduler(msgspec.structs.replace(engine.plan, caches=caches), max_gap=0.0)
        for _ in range(2):
            asked = [
                scheduler.add(prompt, Sampling(max_position=len(prompt) + 40)) for prompt in PROMPTS
            ]
            found = run(engine, scheduler)
            assert [found[request.id] for request in asked] == expected
        assert scheduler.cached_tokens > 0
