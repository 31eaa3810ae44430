"""The scheduler against a model of a worker that checks every page, position and token."""

import hashlib
import random
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from voltapile.gateway.request import Refused, Request, State
from voltapile.gateway.scheduler import ALIGNMENT, Scheduler
from voltapile.topology.plan import CacheGroup, Plan
from voltapile.workers.protocol import (
    ProtocolError,
    Result,
    Row,
    Sampled,
    Sampling,
    Step,
    decode,
    encode,
)

VOCAB = 50


def make_plan(
    context: int = 64,
    slots: int = 3,
    pages: tuple[int, ...] = (40,),
    page_tokens: tuple[int, ...] = (4,),
    batch_tokens: int = 128,
    steps_in_flight: int = 2,
) -> Plan:
    caches = [
        CacheGroup(
            kind="full", layers=[0], kv_heads=1, key_dim=8, value_dim=8, window=0,
            key_type="f16", value_type="f16", page_tokens=tokens, page_bytes=1, pages=count,
        )
        for count, tokens in zip(pages, page_tokens, strict=True)
    ]  # fmt: skip
    return Plan(
        id="p", model=["m"], alias="m", architecture="llama", backend="cpu", endpoint="",
        context=context, slots=slots, batch_tokens=batch_tokens, buckets=[1],
        steps_in_flight=steps_in_flight, answer_rank=0, ranks=[], caches=caches, tensors={},
    )  # fmt: skip


def next_token(tokens: list[int], seed: int) -> int:
    """What the model samples after `tokens`: depends on all of them, and on their order."""
    digest = hashlib.blake2b(repr((tokens, seed)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def alone(prompt: list[int], sampling: Sampling, context: int) -> tuple[list[int], str]:
    """What a request gives when it is alone, and why it ends."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens, sampling.seed))
        if tokens[-1] in sampling.stop_ids:
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= min(sampling.max_position, context):
            return tokens[len(prompt) :], "length"


@dataclass
class Slot:
    sampling: Sampling
    tables: list[list[int]]
    last: int = -1
    next: int = -1
    finish: str = ""


@dataclass
class Model:
    """A worker by its contract: KV lives in pages, and only pages and page tables are looked at."""

    plan: Plan
    slots: dict[int, Slot] = field(default_factory=dict)
    memory: dict[tuple[int, int, int], int] = field(default_factory=dict)
    ends: list[tuple[int, int]] = field(default_factory=list)
    is_second: bool = False  # one before it was lost, so a slot may be released that it never had

    def run(self, step: Step) -> Result:
        assert len({row.slot for row in step.rows}) == len(step.rows)
        assert sum(max(1, len(row.tokens)) for row in step.rows) <= self.plan.batch_tokens
        assert len(set(step.release)) == len(step.release)
        for slot in step.release:
            assert slot in self.slots or self.is_second
            self.slots.pop(slot, None)
        results = [self.row(row) for row in step.rows]
        self.check_pages()
        return Result(id=step.id, rows=[row for row in results if row is not None])

    def row(self, row: Row) -> Sampled | None:
        assert 0 <= row.slot < self.plan.slots
        if row.sampling is not None:
            assert row.slot not in self.slots, "the last occupant was not released"
            self.slots[row.slot] = Slot(row.sampling, [[] for _ in self.plan.caches])
        slot = self.slots[row.slot]
        for table, new in zip(slot.tables, row.pages or [[]] * len(slot.tables), strict=True):
            table += new
        tokens, start = list(map(int, row.tokens)), row.start
        if not tokens:
            assert slot.next >= 0, "continue before anything was sampled"
            tokens, start = [slot.last], slot.next
        for i, token in enumerate(tokens):
            self.write(slot, start + i, token)
        self.ends.append((start, start + len(tokens)))
        return self.sample(row, slot, start + len(tokens)) if row.sample else None

    def write(self, slot: Slot, position: int, token: int) -> None:
        assert position < slot.sampling.max_position - 1, "past the reserved pages"
        for group, (cache, table) in enumerate(zip(self.plan.caches, slot.tables, strict=True)):
            page, offset = divmod(position, cache.page_tokens)
            assert table[page] != 0
            self.memory[group, table[page], offset] = token

    def read(self, slot: Slot, count: int) -> list[int]:
        values = []
        for group, (cache, table) in enumerate(zip(self.plan.caches, slot.tables, strict=True)):
            places = [divmod(p, cache.page_tokens) for p in range(count)]
            values.append([self.memory[group, table[page], offset] for page, offset in places])
        assert all(value == values[0] for value in values)
        return values[0]

    def sample(self, row: Row, slot: Slot, position: int) -> Sampled:
        if slot.finish:
            return Sampled(slot=row.slot)
        assert position < slot.sampling.max_position, "a token past the limit"
        slot.last = next_token(self.read(slot, position), slot.sampling.seed)
        slot.next = position
        if slot.last in slot.sampling.stop_ids:
            slot.finish = "stop"
        elif position + 1 >= slot.sampling.max_position:
            slot.finish = "length"
        return Sampled(slot=row.slot, tokens=[slot.last], finish=slot.finish)

    def check_pages(self) -> None:
        for group, cache in enumerate(self.plan.caches):
            pages = [page for slot in self.slots.values() for page in slot.tables[group]]
            assert len(pages) == len(set(pages)), "a page in two slots"
            assert all(0 < page < cache.pages for page in pages)


class World:
    """Scheduler and Model with the wire between them; collects what each request gives."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.scheduler = Scheduler(plan)
        self.model = Model(plan)
        self.sent: list[Step] = []
        self.done: list[Result] = []
        self.requests: list[Request] = []
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, str] = {}

    def add(self, prompt: list[int], **sampling: object) -> Request:
        request = self.scheduler.add(prompt, Sampling(**sampling))  # type: ignore[arg-type]
        self.requests.append(request)
        self.tokens[request.id] = []
        return request

    def send(self) -> bool:
        step = self.scheduler.schedule()
        if step is None:
            return False
        message = decode([bytes(frame) for frame in encode(step)])
        assert isinstance(message, Step)
        self.sent.append(message)
        alignment = min(ALIGNMENT, self.plan.batch_tokens)
        for row, request in ((r, q) for r in step.rows for q in self.scheduler.running):
            if row.slot == request.slot and len(row.tokens) and not row.sample:
                end = request.computed
                assert end in (len(request.prompt), end // alignment * alignment)
        assert len(self.scheduler.in_flight) <= self.plan.steps_in_flight
        return True

    def work(self) -> bool:
        if not self.sent:
            return False
        self.done.append(self.model.run(self.sent.pop(0)))
        return True

    def receive(self) -> bool:
        if not self.done:
            return False
        for request, chunk in self.scheduler.apply(self.done.pop(0)):
            assert request.id not in self.finish
            assert chunk.tokens or chunk.finish
            self.tokens[request.id] += chunk.tokens
            if chunk.finish:
                self.finish[request.id] = chunk.finish
        return True

    def cancel(self, request: Request) -> None:
        if self.scheduler.cancel(request.id):
            self.finish[request.id] = "cancelled"

    def crash(self) -> None:
        self.scheduler.reset()
        self.model = Model(self.plan, is_second=True)
        self.sent.clear()
        self.done.clear()

    def forget(self) -> None:
        """The scheduler takes the worker for lost, but it goes on."""
        self.scheduler.reset()

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            self.send()
            if not (self.work() or self.receive()):
                break
            self.receive()
        self.check_idle()

    def check_idle(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.waiting
        assert not scheduler.running
        assert not scheduler.in_flight
        for pool in scheduler.pools:
            assert pool.free == pool.total
        for request in self.requests:
            assert request.state is State.FINISHED
            if self.finish[request.id] == "cancelled":
                expected, _ = alone(request.prompt, request.sampling, self.plan.context)
                assert self.tokens[request.id] == expected[: len(self.tokens[request.id])]
            else:
                assert (self.tokens[request.id], self.finish[request.id]) == alone(
                    request.prompt, request.sampling, self.plan.context
                )


def test_one_request_alone() -> None:
    world = World(make_plan())
    request = world.add([1, 2, 3], max_position=10)
    world.run()
    assert len(world.tokens[request.id]) == 7
    assert world.finish[request.id] == "length"


def test_step_n_plus_1_leaves_before_result_n() -> None:
    world = World(make_plan(steps_in_flight=2))
    world.add([1, 2, 3], max_position=10)
    assert world.send()
    assert world.send()
    assert not world.send(), "more than the plan allows"
    prompt, ahead = world.sent
    assert list(prompt.rows[0].tokens) == [1, 2, 3]
    assert prompt.rows[0].sampling is not None
    assert len(ahead.rows[0].tokens) == 0
    assert ahead.rows[0].sampling is None
    world.run()


def test_run_ahead_stops_at_the_limit() -> None:
    world = World(make_plan(steps_in_flight=8))
    world.add([1, 2, 3], max_position=5)
    assert world.send()
    assert world.send()
    assert not world.send(), "the third row would sample past max_position"
    world.run()


def test_decode_rows_come_first_and_chunks_are_aligned() -> None:
    plan = make_plan(context=512, slots=4, pages=(600,), batch_tokens=100, steps_in_flight=1)
    world = World(plan)
    world.add([1], max_position=400)
    world.send()
    long = world.add(list(range(300)), max_position=310)
    world.work()
    world.receive()
    for start, end in ((0, 64), (64, 128), (128, 192), (192, 256), (256, 300)):
        world.send()
        decode, chunk = world.sent[0].rows
        assert len(decode.tokens) == 0
        assert (chunk.start, chunk.start + len(chunk.tokens)) == (start, end)
        assert chunk.sample == (end == 300)
        assert bool(chunk.pages) == (start == 0)
        world.work()
        world.receive()
    world.cancel(long)
    world.run()


def test_stop_ids_end_a_request_and_later_rows_give_nothing() -> None:
    tokens, _ = alone([7, 8], Sampling(seed=3, max_position=30), 64)
    world = World(make_plan(steps_in_flight=3))
    request = world.add([7, 8], seed=3, max_position=30, stop_ids=[tokens[2]])
    world.run()
    assert world.finish[request.id] == "stop"
    assert world.tokens[request.id] == tokens[: tokens.index(tokens[2]) + 1]


def test_pages_run_out_and_the_last_to_arrive_waits() -> None:
    # 15 pages of 4: three requests of 30 positions take 8 each
    world = World(make_plan(pages=(16,), slots=3))
    requests = [world.add([i], max_position=31) for i in range(3)]
    world.run()
    assert world.scheduler.preemptions > 0
    ends = [world.finish[request.id] for request in requests]
    assert ends == ["length"] * 3
    assert list(world.finish) == [0, 1, 2], "the first to arrive ends first"


def test_a_preempted_request_waits_for_its_tokens_in_flight() -> None:
    world = World(make_plan(context=24, pages=(9,), slots=2, steps_in_flight=3))
    first, second = world.add([1] * 15, max_position=24), world.add([2], max_position=24)
    while world.scheduler.preemptions == 0:
        while world.send():
            pass
        world.work()
        world.receive()
    assert second.ahead > 0
    known = len(second.known)
    world.cancel(first)
    while world.work() or world.receive():
        world.send()
        assert second.state is State.WAITING or len(second.known) > known
        assert second.state is State.WAITING or second.ahead <= 3
    world.run()


def test_decoding_slots_leave_room_for_a_whole_chunk() -> None:
    world = World(make_plan(slots=8, pages=(500,), batch_tokens=70))
    for i in range(8):
        world.add([i], max_position=10)
    world.send()
    assert len(world.scheduler.running) == 70 - ALIGNMENT
    world.run()


def test_admission_is_first_come_first_served() -> None:
    world = World(make_plan(slots=1))
    for i in range(4):
        world.add([i], max_position=5)
    world.run()
    assert list(world.finish) == [0, 1, 2, 3]


def test_a_slot_is_released_before_its_next_occupant() -> None:
    world = World(make_plan(slots=1, steps_in_flight=1))
    first = world.add([1], max_position=20)
    world.send()
    second = world.add([2], max_position=20)
    world.cancel(first)
    world.work()
    world.receive()
    assert world.send(), "cancelled: its slot is free within one step"
    assert world.sent[0].release == [0]
    assert world.sent[0].rows[0].slot == 0
    world.cancel(second)
    world.run()
    assert world.tokens[first.id] == []


def test_cancel_while_waiting_disturbs_nobody() -> None:
    world = World(make_plan(slots=1))
    world.add([1], max_position=5)
    queued = world.add([2], max_position=5)
    world.send()
    world.cancel(queued)
    world.cancel(queued)
    world.run()
    assert world.tokens[queued.id] == []


def test_clear_returns_all_that_had_not_ended() -> None:
    world = World(make_plan(slots=1))
    requests = [world.add([i], max_position=5) for i in range(3)]
    world.send()
    assert world.scheduler.clear() == requests
    assert all(request.state is State.FINISHED for request in requests)
    assert world.scheduler.schedule() is None


@pytest.mark.parametrize(
    ("prompt", "sampling", "code", "param"),
    [
        ([], Sampling(), "invalid_value", "prompt"),
        ([0] * 64, Sampling(), "context_length_exceeded", "prompt"),
        ([0] * 9, Sampling(max_position=9), "invalid_value", "max_tokens"),
        ([0], Sampling(stop_ids=list(range(17))), "invalid_value", "stop"),
    ],
)
def test_refusals(prompt: list[int], sampling: Sampling, code: str, param: str) -> None:
    with pytest.raises(Refused) as refused:
        Scheduler(make_plan()).add(prompt, sampling)
    assert (refused.value.code, refused.value.param) == (code, param)


def test_what_never_fits_is_refused_at_once() -> None:
    scheduler = Scheduler(make_plan(pages=(5,)))  # 16 positions
    scheduler.add([0] * 3, Sampling(max_position=17))
    with pytest.raises(Refused, match="pool"):
        scheduler.add([0] * 3, Sampling(max_position=18))


def test_a_prompt_may_take_all_but_one_position() -> None:
    world = World(make_plan(context=64))
    request = world.add([1] * 63)
    world.run()
    assert len(world.tokens[request.id]) == 1


def test_a_row_that_failed_ends_its_request_alone() -> None:
    world = World(make_plan())
    bad, good = world.add([1], max_position=9), world.add([2], max_position=9)
    world.send()
    world.work()
    row = world.done[0].rows[0]
    world.done[0].rows[0] = msgspec.structs.replace(row, tokens=[], finish="error", error="nan")
    [(request, chunk), _] = world.scheduler.apply(world.done.pop())
    assert (request, chunk.finish, chunk.error) == (bad, "error", "nan")
    assert bad.state is State.FINISHED
    assert good.state is State.RUNNING


def test_results_that_do_not_belong() -> None:
    world = World(make_plan())
    assert world.scheduler.apply(Result(id=5)) == []
    world.add([1], max_position=9)
    world.send()
    with pytest.raises(ProtocolError, match="slots"):
        world.scheduler.apply(Result(id=0))
    world.crash()
    world.send()
    assert world.scheduler.apply(Result(id=0)) == [], "of the worker before"
    with pytest.raises(ProtocolError, match="step 1"):
        world.scheduler.apply(Result(id=9))


def test_a_resumed_prompt_is_cut_where_it_was_cut_before() -> None:
    world = World(make_plan(context=256, pages=(80,), steps_in_flight=1))
    world.add([1] * 70, max_position=200)
    for _ in range(10):
        world.send(), world.work(), world.receive()
    world.crash()
    for _ in range(3):
        world.send(), world.work(), world.receive()
    assert world.model.ends == [(0, 70), (70, 80), (80, 81)]
    world.run()


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
    context = draw(st.integers(8, 90))
    pages = tuple(-(-(context - 1) // size) + 1 + draw(st.integers(0, 12)) for size in sizes)
    return make_plan(
        context=context,
        slots=draw(st.integers(1, 5)),
        pages=pages,
        page_tokens=tuple(sizes),
        batch_tokens=draw(st.sampled_from([1, 5, 64, 65, 70, 128])),
        steps_in_flight=draw(st.integers(1, 3)),
    )


@settings(max_examples=300, deadline=None)
@given(plans(), st.integers(0, 2**32), st.sampled_from([0.0, 0.01, 0.05]))
def test_any_interleaving_gives_each_what_it_gets_alone(
    plan: Plan, seed: int, crashes: float
) -> None:
    rng = random.Random(seed)
    world = World(plan)
    for _ in range(rng.randint(1, 400)):
        kind = rng.random()
        if kind < crashes:
            rng.choice([world.crash, world.forget])()
        elif kind < 0.1 and len(world.requests) < 12:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, plan.context - 1))]
            stop_ids = rng.sample(range(VOCAB), rng.choice([0, 1, 4]))
            limit = len(prompt) + rng.randint(1, plan.context)
            world.add(prompt, seed=rng.randrange(9), stop_ids=stop_ids, max_position=limit)
        elif kind < 0.15 and world.scheduler.running:
            world.cancel(rng.choice(world.scheduler.running))
        elif kind < 0.17 and world.requests:
            world.cancel(rng.choice(world.requests))
        else:
            rng.choice([world.send, world.work, world.receive])()
    world.run()
