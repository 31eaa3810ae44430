"""The scheduler against a model of a worker that checks every page, position and token."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from voltapile.gateway.request import Refused, Request, State
from voltapile.gateway.scheduler import ALIGNMENT, Scheduler
from voltapile.gateway.thought import ThoughtLimit
from voltapile.topology.plan import CacheGroup, Plan
from voltapile.workers.outbox import Outbox
from voltapile.workers.protocol import (
    Hold,
    ProtocolError,
    Result,
    Row,
    Sampled,
    Sampling,
    Step,
    Want,
    decode,
    encode,
)
from voltapile.workers.rounds import Rounds

VOCAB = 50
SECONDS = 0.01  # of the model's Steps, where nothing else is said


def make_plan(
    context: int = 64,
    slots: int = 3,
    pages: tuple[int, ...] = (40,),
    page_tokens: tuple[int, ...] = (4,),
    batch_tokens: int = 128,
    steps_in_flight: int = 2,
    windows: tuple[int, ...] = (0, 0, 0),
) -> Plan:
    caches = [
        CacheGroup(
            kind="window" if window else "full", layers=[0], kv_heads=1, key_dim=8, value_dim=8,
            window=window, key_type="f16", value_type="f16", page_tokens=tokens, page_bytes=1,
            pages=count,
        )
        for count, tokens, window in zip(pages, page_tokens, windows, strict=False)
    ]  # fmt: skip
    return Plan(
        id="p", model=["m"], alias="m", architecture="llama", backend="cpu", endpoint="",
        context=context, slots=slots, batch_tokens=batch_tokens, buckets=[1],
        steps_in_flight=steps_in_flight, answer_rank=0, ranks=[], caches=caches, tensors={},
    )  # fmt: skip


def digest(*values: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little")


def alone(prompt: list[int], sampling: Sampling, context: int) -> tuple[list[int], str]:
    """What a request gives when it is alone, and why it ends."""
    chain, tokens = 0, list(prompt)
    for token in prompt:
        chain = digest(chain, token)
    while True:
        tokens.append(digest(chain, sampling.seed) % VOCAB)
        chain = digest(chain, tokens[-1])
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


@dataclass(frozen=True)
class Entry:
    """What a cache holds for one position: a digest of all tokens up to it."""

    position: int
    before: int
    chain: int
    is_bad: bool = False


@dataclass
class Model:
    """A worker by its contract: KV lives in pages, and only pages and page tables are looked at.

    Every entry that a token sees is followed back, so a page that was shared wrongly, or given
    away too early, is a broken chain.
    """

    plan: Plan
    slots: dict[int, Slot] = field(default_factory=dict)
    memory: dict[tuple[int, int, int], Entry] = field(default_factory=dict)
    ends: list[tuple[int, int]] = field(default_factory=list)
    is_second: bool = False  # one before it was lost, so a slot may be released that it never had
    computed: int = 0
    poison: int = -1  # token whose entry is not finite
    seconds: Callable[[Step], float] = lambda step: SECONDS

    def run(self, step: Step) -> Result:
        assert len({row.slot for row in step.rows}) == len(step.rows)
        assert sum(max(1, len(row.tokens)) for row in step.rows) <= self.plan.batch_tokens
        assert len(set(step.release)) == len(step.release)
        for slot in step.release:
            assert slot in self.slots or self.is_second
            self.slots.pop(slot, None)
        # All rows of a Step run at once: none may see what another one of them writes.
        results = [self.row(row) for row in reversed(step.rows)]
        rows = [row for row in reversed(results) if row is not None]
        return Result(id=step.id, rows=rows, seconds=self.seconds(step))

    def row(self, row: Row) -> Sampled | None:
        assert 0 <= row.slot < self.plan.slots
        if row.sampling is not None:
            assert row.slot not in self.slots, "the last occupant was not released"
            self.slots[row.slot] = Slot(row.sampling, [[] for _ in self.plan.caches])
            assert row.history is None or len(row.history) == row.start
        slot = self.slots[row.slot]
        for cache, table, new in zip(
            self.plan.caches, slot.tables, row.pages or [[]] * len(slot.tables), strict=True
        ):
            assert all(0 <= page < cache.pages for page in new)
            table += new
        if slot.finish:
            return Sampled(slot=row.slot)
        tokens, start = list(map(int, row.tokens)), row.start
        if not tokens:
            assert slot.next >= 0, "continue before anything was sampled"
            tokens, start = [slot.last], slot.next
        before = self.seen(slot, start)
        for i, token in enumerate(tokens):
            before = self.write(slot, start + i, token, before)
        self.computed += len(tokens)
        self.ends.append((start, start + len(tokens)))
        return self.sample(row, slot, start + len(tokens)) if row.sample else None

    def write(self, slot: Slot, position: int, token: int, before: Entry | None) -> Entry:
        assert position < slot.sampling.max_position - 1, "past the reserved pages"
        chain = before.chain if before else 0
        is_bad = token == self.poison or (before is not None and before.is_bad)
        entry = Entry(position, chain, digest(chain, token), is_bad)
        for group, (cache, table) in enumerate(zip(self.plan.caches, slot.tables, strict=True)):
            page, offset = divmod(position, cache.page_tokens)
            assert table[page] != 0
            self.memory[group, table[page], offset] = entry
        return entry

    def seen(self, slot: Slot, position: int) -> Entry | None:
        """The entry before `position`, once all that a token there sees has been checked."""
        last = None
        for group, (cache, table) in enumerate(zip(self.plan.caches, slot.tables, strict=True)):
            first = max(0, position - cache.window + 1) if cache.window else 0
            before = None
            for p in range(first, position):
                page, offset = divmod(p, cache.page_tokens)
                entry = self.memory[group, table[page], offset]
                assert entry.position == p
                assert before is None or entry.before == before.chain
                before = entry
            if before is not None:
                assert last is None or (before.position, before.chain) == (
                    last.position,
                    last.chain,
                )
                last = before if last is None or before.is_bad else last
        return last

    def sample(self, row: Row, slot: Slot, position: int) -> Sampled:
        assert position < slot.sampling.max_position, "a token past the limit"
        self.seen(slot, position)
        page, offset = divmod(position - 1, self.plan.caches[0].page_tokens)
        entry = self.memory[0, slot.tables[0][page], offset]
        if entry.is_bad:
            slot.finish = "error"
            return Sampled(slot=row.slot, finish="error", error="not finite")
        slot.last = digest(entry.chain, slot.sampling.seed) % VOCAB
        slot.next = position
        if slot.last in slot.sampling.stop_ids:
            slot.finish = "stop"
        elif position + 1 >= slot.sampling.max_position:
            slot.finish = "length"
        return Sampled(slot=row.slot, tokens=[slot.last], finish=slot.finish)


class World:
    """Scheduler and Model with the wire between them; collects what each request gives.

    repeats: a Step may have several rounds. joins: their Results come together, all there are.
    """

    def __init__(
        self,
        plan: Plan,
        max_gap: float = 0.25,
        alignment: int = ALIGNMENT,
        repeats: bool = True,
        joins: bool = False,
    ) -> None:
        self.plan, self.alignment = plan, min(alignment, plan.batch_tokens)
        self.scheduler = Scheduler(plan, max_gap, alignment)
        self.scheduler.can_repeat = repeats
        self.model = Model(plan)
        self.outbox = Outbox(lambda: 0.0)
        self.interval = 1.0 if joins else -1.0
        self.sent: list[Any] = []  # Steps and Holds
        self.rounds = Rounds()
        self.begun: list[tuple[Result, Step]] = []  # by a device that computes while more is sent
        self.done: list[Result] = []
        self.requests: list[Request] = []
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, str] = {}

    def add(self, prompt: list[int], client: str = "", **sampling: object) -> Request:
        asked = Sampling(**sampling)  # type: ignore[arg-type]
        request = self.scheduler.add(prompt, asked, client=client)
        self.requests.append(request)
        self.tokens[request.id] = []
        return request

    def send(self) -> bool:
        step = self.scheduler.schedule() or self.scheduler.hold()
        if step is None:
            return False
        message = decode([bytes(frame) for frame in encode(step)])
        self.sent.append(message)
        if isinstance(message, Step):
            self.check_ends(message)
        assert len(self.scheduler.in_flight) <= self.plan.steps_in_flight
        return True

    def check_ends(self, step: Step) -> None:
        for row, request in ((r, q) for r in step.rows for q in self.scheduler.running):
            if row.slot == request.slot and len(row.tokens) and not row.sample:
                end = request.computed
                assert end in (len(request.prompt), end // self.alignment * self.alignment)

    def read(self) -> bool:
        if not self.sent:
            return False
        message = self.sent.pop(0)
        if isinstance(message, Step):
            self.rounds.add(message)
        else:
            self.rounds.hold(message.step)
        return True

    def begin(self) -> bool:
        if not self.rounds:
            return False
        step = self.rounds.next()
        self.begun.append((self.model.run(step), step))
        return True

    def end(self) -> bool:
        if not self.begun:
            return False
        result, step = self.begun.pop(0)
        self.rounds.settle(result)
        step.interval = self.interval
        for due in self.outbox.put(result, step):
            message = decode([bytes(frame) for frame in encode(due)])
            assert isinstance(message, Result)
            self.done.append(message)
        return True

    def work(self) -> bool:
        """One round, whole."""
        while self.sent and (not self.rounds or isinstance(self.sent[0], Hold)):
            self.read()
        return self.begin() and self.end()

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
        self.forget()
        self.model = Model(self.plan, is_second=True)
        self.rounds, self.outbox = Rounds(), Outbox(lambda: 0.0)
        for messages in (self.sent, self.begun, self.done):
            messages.clear()

    def forget(self) -> None:
        """The scheduler takes the worker for lost, but it goes on."""
        for request in self.scheduler.reset():
            self.finish[request.id] = "crash"

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            while self.send():
                pass
            if not (self.end() or self.work() or self.receive()):
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
        assert scheduler.schedule() is None
        for request in self.requests:
            assert request.state is State.FINISHED
            if self.finish[request.id] in ("cancelled", "crash", "error"):
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
    world = World(make_plan(steps_in_flight=2), repeats=False)
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
    world = World(make_plan(steps_in_flight=8), repeats=False)
    world.add([1, 2, 3], max_position=5)
    assert world.send()
    assert world.send()
    assert not world.send(), "the third row would sample past max_position"
    world.run()


def test_decode_rows_come_first_and_chunks_are_aligned() -> None:
    plan = make_plan(context=512, slots=4, pages=(600,), batch_tokens=100, steps_in_flight=1)
    world = World(plan, repeats=False)
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
    world = World(make_plan(context=24, pages=(9,), slots=2, steps_in_flight=3), repeats=False)
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
    world = World(make_plan(slots=1, steps_in_flight=1), repeats=False)
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
        ([0], Sampling(stop_ids=list(range(17))), "invalid_value", "stop_token_ids"),
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


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


# --- shared prefixes ----------------------------------------------------------------------


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    world = World(make_plan(context=512, pages=(200,)))
    first = world.add(prompt_of(200), max_position=203)
    world.run()
    before = world.model.computed
    second = world.add(prompt_of(200), max_position=203, seed=4)
    third = world.add([*prompt_of(130), 7, 8], max_position=140)
    world.run()
    assert (first.cached, second.cached, third.cached) == (0, 192, 128)
    assert world.scheduler.cached_tokens == 192 + 128
    assert world.model.computed - before == 8 + 2 + 4 + 7


def test_one_token_is_always_computed() -> None:
    world = World(make_plan(context=256, pages=(100,)))
    world.add(prompt_of(128), max_position=130)
    world.run()
    again = world.add(prompt_of(128), max_position=130)
    world.run()
    assert again.cached == 64


def test_the_next_turn_reuses_the_answer() -> None:
    world = World(make_plan(context=512, pages=(200,)))
    first = world.add(prompt_of(50), max_position=200)
    world.run()
    turn = world.add([*first.known, 1, 2, 3], max_position=210)
    world.run()
    assert turn.cached == 192


def test_the_last_token_of_an_answer_is_not_computed() -> None:
    """Known to the end, but nothing was computed for it: its block must not be kept."""
    world = World(make_plan(context=512, pages=(200,), steps_in_flight=3))
    first = world.add(prompt_of(60), max_position=128)
    world.run()
    assert len(first.known) == 128
    turn = world.add([*first.known, 5], max_position=140)
    world.run()
    assert turn.cached == 64


def test_a_stop_token_at_the_end_of_a_block_is_not_computed() -> None:
    """A Step in flight asks for it, but the worker knows that it is the last."""
    for seed in range(100):
        tokens, _ = alone(prompt_of(60), Sampling(seed=seed, max_position=200), 512)
        if tokens.index(tokens[67]) == 67:
            break
    world = World(make_plan(context=512, pages=(200,), steps_in_flight=3))
    first = world.add(prompt_of(60), seed=seed, stop_ids=[tokens[67]], max_position=200)
    world.run()
    assert (len(first.known), world.finish[first.id]) == (128, "stop")
    turn = world.add([*first.known, 5], max_position=140)
    world.run()
    assert turn.cached == 64


def test_prompts_that_come_together_are_computed_once() -> None:
    world = World(make_plan(context=512, slots=4, pages=(300,), batch_tokens=100))
    for seed in range(4):
        world.add(prompt_of(300), max_position=302, seed=seed)
    world.run()
    assert world.model.computed == 300 + 3 * (300 - 256) + 4


def test_who_waits_for_a_prefix_goes_on_when_it_is_cancelled() -> None:
    world = World(make_plan(context=512, slots=4, pages=(300,), batch_tokens=70))
    first = world.add(prompt_of(300), max_position=305)
    second = world.add(prompt_of(300), max_position=305, seed=1)
    other = world.add(prompt_of(10, seed=2), max_position=12)
    world.send()
    assert second.state is State.WAITING
    world.send()
    assert other.state is State.RUNNING or world.scheduler.waiting, "a later one may pass"
    world.cancel(first)
    world.run()
    assert second.cached >= 64


def test_a_waiting_twin_is_passed_by_others() -> None:
    world = World(make_plan(context=512, slots=4, pages=(300,), batch_tokens=128))
    for prompt in (prompt_of(100), prompt_of(100), prompt_of(20, seed=3)):
        world.add(prompt, max_position=120)
    world.send()
    assert [list(map(int, row.tokens)) for row in world.sent[0].rows] == [
        prompt_of(100), prompt_of(20, seed=3),
    ]  # fmt: skip
    world.run()


def test_what_was_used_longest_ago_is_given_up_first() -> None:
    world = World(make_plan(context=130, slots=1, pages=(100,)))  # 99 pages of 4
    for seed in range(3):
        world.add(prompt_of(100, seed=seed), max_position=102)
        world.run()
    refreshed = world.add(prompt_of(100), max_position=102)
    world.run()
    big = world.add(prompt_of(124, seed=9), max_position=129)
    world.run()
    again = [world.add(prompt_of(100, seed=seed), max_position=102) for seed in (0, 2, 1)]
    world.run()
    assert (refreshed.cached, big.cached) == (64, 0)
    assert [request.cached for request in again][:1] == [64]


def test_pages_without_a_user_are_as_good_as_free() -> None:
    world = World(make_plan(context=64, slots=1, pages=(17,), batch_tokens=64), alignment=8)
    for seed in range(6):
        world.add(prompt_of(50, seed=seed), max_position=64)
    world.run()
    assert world.scheduler.preemptions == 0


def test_a_lost_worker_has_lost_its_pages() -> None:
    world = World(make_plan(context=256, pages=(100,)))
    world.add(prompt_of(150), max_position=152)
    world.run()
    world.crash()
    again = world.add(prompt_of(150), max_position=152)
    world.run()
    assert again.cached == 0


def test_a_preempted_request_comes_back_through_the_cache() -> None:
    world = World(make_plan(context=60, slots=2, pages=(25,), steps_in_flight=2), alignment=4)
    world.add(prompt_of(20), max_position=60)
    world.add(prompt_of(20, seed=1), max_position=60)
    world.run()
    assert world.scheduler.preemptions > 0
    assert world.model.computed < 2 * 59 + 20


def test_penalties_are_told_the_reused_tokens() -> None:
    world = World(make_plan(context=256, pages=(100,)))
    world.add(prompt_of(100), max_position=102)
    world.run()
    for sampling, expected in (({}, None), ({"presence_penalty": 0.5}, prompt_of(100)[:64])):
        request = world.add(prompt_of(100), max_position=102, **sampling)
        world.send()
        [row] = world.sent[0].rows
        assert row.start == 64
        assert (None if row.history is None else row.history.tolist()) == expected
        world.run()
        assert request.cached == 64


def test_a_prompt_whose_probabilities_are_wanted_is_computed() -> None:
    world = World(make_plan(context=256, pages=(100,)))
    world.add(prompt_of(100), max_position=102)
    world.run()
    want = Want(prompt_logprobs=1)
    request = world.scheduler.add(prompt_of(100), Sampling(max_position=102), want)
    world.send()
    assert (world.sent[0].rows[0].start, request.cached) == (0, 0)


def test_a_salt_keeps_texts_apart() -> None:
    world = World(make_plan(context=256, pages=(100,)))
    world.add(prompt_of(100), max_position=102)
    world.run()
    salted = world.scheduler.add(prompt_of(100), Sampling(max_position=102), salt=b"a picture")
    world.send()
    assert salted.cached == 0


# --- windows ------------------------------------------------------------------------------


def test_pages_behind_a_window_are_used_again() -> None:
    plan = make_plan(
        context=400, pages=(101, 14), page_tokens=(4, 4), windows=(0, 10), batch_tokens=36
    )
    world = World(plan, alignment=4)
    world.add(prompt_of(300), max_position=400)
    world.run()
    assert world.scheduler.preemptions == 0


def test_a_prefix_needs_only_what_its_window_sees() -> None:
    plan = make_plan(context=400, pages=(300, 300), page_tokens=(4, 4), windows=(0, 10))
    world = World(plan, alignment=8)
    world.add(prompt_of(300), max_position=302)
    world.run()
    again = world.add(prompt_of(300), max_position=302)
    world.send()
    first = world.sent[0].rows[0]
    assert again.cached == 296
    assert first.pages[1][:71] == [0] * 71
    assert all(first.pages[1][72:])
    world.run()


def test_a_prefix_whose_window_was_given_away_is_not_used() -> None:
    plan = make_plan(context=400, pages=(400, 45), page_tokens=(4, 4), windows=(0, 32))
    world = World(plan, alignment=8)
    world.add(prompt_of(80), max_position=82)
    world.run()
    world.add(prompt_of(300, seed=1), max_position=302)
    world.run()
    again = world.add(prompt_of(80), max_position=82)
    world.run()
    assert again.cached == 0


# --- one that fails, one that kills -------------------------------------------------------


def test_what_a_failed_request_has_computed_is_not_kept() -> None:
    world = World(make_plan(context=256, pages=(100,)))
    world.model.poison = VOCAB
    prompt = [*prompt_of(30), VOCAB, *prompt_of(100)]
    bad = world.add(prompt, max_position=160)
    world.run()
    assert world.finish[bad.id] == "error"
    world.model.poison = -1
    again = world.add(prompt, max_position=160)
    world.run()
    assert (again.cached, again.is_retried) == (0, False)
    assert world.finish[again.id] == "length"


def test_who_shares_pages_of_a_failed_request_is_computed_anew() -> None:
    """Something went wrong for the first only: the second must not notice."""
    world = World(make_plan(context=256, slots=2, pages=(100,), steps_in_flight=3))
    world.model.poison = 3
    first = world.add([3, *prompt_of(100)], max_position=160)
    second = world.add([3, *prompt_of(100)], max_position=160, seed=1)
    world.send()
    world.work()
    world.model.poison = -1
    world.run()
    assert world.finish == {first.id: "error", second.id: "length"}
    assert (second.is_retried, second.cached) == (True, 0)


def test_a_request_that_fails_by_itself_fails_once_more() -> None:
    world = World(make_plan(context=256, pages=(100,)))
    world.add(prompt_of(100), max_position=102)
    world.run()
    world.model.poison = VOCAB
    bad = world.add([*prompt_of(100), VOCAB], max_position=110)
    world.run()
    assert (bad.is_retried, world.finish[bad.id]) == (True, "error")


def killed_by(world: World, culprits: set[int], crashes: int) -> None:
    """Run; a Step with a token of `culprits` loses the worker, at most `crashes` times."""
    for _ in range(10_000):
        world.send()
        if world.sent and any(culprits & set(map(int, row.tokens)) for row in world.sent[0].rows):
            crashes -= 1
            assert crashes >= 0, "it goes on and on"
            world.crash()
        elif not (world.work() or world.receive()):
            break
        world.receive()
    world.check_idle()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_who_kills_the_worker_twice_ends_and_others_go_on(count: int) -> None:
    world = World(make_plan(context=256, slots=6, pages=(400,), batch_tokens=70))
    good = [world.add(prompt_of(40, seed=i), max_position=100) for i in range(3)]
    world.send(), world.work(), world.receive()
    bad = [world.add([*prompt_of(90, seed=i), VOCAB], max_position=200) for i in range(count)]
    killed_by(world, {VOCAB}, 2 * count)
    assert {world.finish[request.id] for request in good} == {"length"}
    assert {world.finish[request.id] for request in bad} == {"crash"}


def test_who_comes_beside_a_suspect_is_not_its_company() -> None:
    """Or one that two poisons meet would be blamed for the second."""
    world = World(make_plan(context=256, slots=6, pages=(400,), batch_tokens=70))
    good = world.add(prompt_of(100), max_position=250)
    bad = []
    for seed in range(4):
        prompt = [*prompt_of(20, seed=seed), VOCAB]
        bad.append(world.add(prompt, max_position=200, client=f"{seed}"))
        for _ in range(10):
            world.send()
            if world.sent and any(VOCAB in row.tokens for row in world.sent[0].rows):
                world.crash()
                break
            world.work(), world.receive()
    killed_by(world, {VOCAB}, 8)
    assert world.finish[good.id] == "length"
    assert {world.finish[request.id] for request in bad} == {"crash"}


def test_a_suspect_is_computed_alone_until_it_is_past_it() -> None:
    world = World(make_plan(context=256, slots=3, pages=(400,)))
    requests = [world.add(prompt_of(5, seed=i), max_position=60) for i in range(3)]
    for _ in range(10):
        world.send(), world.work(), world.receive()
    world.send()
    world.crash()
    late = world.add([1], max_position=10)
    known = {request.id: len(request.known) for request in requests}
    alone_in = []
    while any(request.crashes for request in requests):
        world.send()
        if world.sent:
            alone_in.append(len(world.sent[-1].rows))
        world.work(), world.receive()
        assert late.state is State.WAITING
    assert set(alone_in) == {1}
    assert all(len(request.known) > known[request.id] for request in requests)
    world.run()
    assert set(world.finish.values()) == {"length"}


def test_a_suspect_waits_for_a_slot_while_others_go_on() -> None:
    """Three suspects and two slots: one had been preempted while its token was on its way."""
    plan = make_plan(context=64, slots=3, pages=(8,), page_tokens=(16,))
    world = World(plan)
    requests = [world.add(prompt_of(20, seed=i), max_position=60) for i in range(3)]
    for n in range(200):
        world.send()
        if n % 3 == 0:
            world.work(), world.receive()
        if any(request.ahead for request in world.scheduler.waiting):
            break
    else:
        pytest.fail("nobody was preempted like that")
    world.crash()
    world.run()
    assert {world.finish[request.id] for request in requests} == {"length"}


def test_suspects_need_not_wait_for_rounds_that_were_to_come() -> None:
    world = World(make_plan(context=256, slots=4, pages=(80,), page_tokens=(64,)))
    requests = [world.add([token], max_position=200) for token in range(4)]
    assert world.send()
    assert world.sent[0].rounds == 32
    world.work(), world.receive()
    world.crash()
    while min(len(request.known) for request in requests) < 13:
        world.send(), world.work(), world.receive()
    assert max(len(request.known) for request in requests) < 16, "nobody was alone for long"
    world.run()


@pytest.mark.parametrize("free", range(4))
def test_a_suspect_that_finds_no_page_waits(free: int) -> None:
    """Others hold them, and it was lost further on than it has tokens."""
    plan = make_plan(context=24, slots=2, pages=(25,), page_tokens=(1,), steps_in_flight=3)
    world = World(plan, alignment=1)
    for token in range(2):
        world.add([token] * 2, max_position=24)
    while world.scheduler.pools[0].free > free:
        while world.send():
            pass
        world.work(), world.receive()
    world.crash()
    world.run()


def test_suspects_are_told_apart_by_running_one_at_a_time() -> None:
    world = World(make_plan(context=256, slots=6, pages=(400,)))
    good = [world.add(prompt_of(5, seed=i), max_position=50) for i in range(3)]
    bad = world.add([VOCAB], max_position=50)
    good += [world.add(prompt_of(5, seed=i), max_position=50) for i in range(3, 5)]
    killed_by(world, {VOCAB}, 2)
    assert {world.finish[request.id] for request in good} == {"length"}
    assert world.finish[bad.id] == "crash"


def test_a_worker_that_dies_now_and_then_ends_nobody() -> None:
    world = World(make_plan(context=256, pages=(200,)))
    requests = [world.add(prompt_of(40, seed=i), max_position=250) for i in range(3)]
    for _ in range(6):
        for _ in range(60):
            world.send(), world.work(), world.receive()
        world.crash()
    world.run()
    assert {world.finish[request.id] for request in requests} == {"length"}


def test_a_worker_that_dies_idle_accuses_nobody() -> None:
    world = World(make_plan())
    request = world.add([1], max_position=60)
    for _ in range(3):
        world.crash()
    assert request.crashes == 0
    world.run()


# --- fairness and gaps --------------------------------------------------------------------


def steps_until_first_token(world: World, request: Request) -> int:
    for count in range(1, 10_000):
        world.send()
        world.work()
        world.receive()
        if world.tokens[request.id]:
            return count
    raise AssertionError("never")


def test_a_long_prompt_does_not_hold_up_another_client() -> None:
    plan = make_plan(context=20_000, slots=4, pages=(2000,), page_tokens=(16,), batch_tokens=256)
    world = World(plan)
    for seed in range(6):
        world.add(prompt_of(4000, seed=seed), client="greedy", max_position=4002)
    world.send(), world.work(), world.receive()
    short = world.add(prompt_of(100, seed=9), client="modest", max_position=110)
    assert steps_until_first_token(world, short) <= 2
    assert sum(request.client == "greedy" for request in world.scheduler.running) == 1
    world.run()


def test_a_long_prompt_does_not_hold_up_a_short_one_of_its_client() -> None:
    plan = make_plan(context=20_000, slots=4, pages=(2000,), page_tokens=(16,), batch_tokens=256)
    world = World(plan)
    long = world.add(prompt_of(4000), max_position=4002)
    world.send(), world.work(), world.receive()
    short = world.add(prompt_of(100, seed=9), max_position=110)
    assert steps_until_first_token(world, short) <= 2
    assert not world.tokens[long.id]
    world.run()


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    plan = make_plan(context=4000, slots=3, pages=(600,), page_tokens=(16,), batch_tokens=67)
    world = World(plan)
    world.add(prompt_of(60, seed=99), max_position=62)
    old = world.add(prompt_of(1500), max_position=1502)
    for i in range(200):
        world.add(prompt_of(120, seed=i), max_position=122)
        world.send(), world.work(), world.receive()
        if old.id in world.finish:
            break
    assert i <= 2 * (1500 / ALIGNMENT) + 10
    world.run()


def test_clients_share_the_budget_equally() -> None:
    plan = make_plan(context=20_000, slots=4, pages=(2000,), page_tokens=(16,), batch_tokens=192)
    world = World(plan)
    requests = [
        world.add(prompt_of(3000, seed=i), client=f"c{i}", max_position=3010) for i in range(2)
    ]
    for _ in range(8):
        world.send(), world.work(), world.receive()
    assert abs(requests[0].computed - requests[1].computed) <= ALIGNMENT
    world.run()


def test_nobody_starves_behind_a_stream_of_newcomers() -> None:
    plan = make_plan(context=4000, slots=2, pages=(600,), page_tokens=(16,), batch_tokens=66)
    world = World(plan)
    old = world.add(prompt_of(1500), client="old", max_position=1502)
    for i in range(200):
        world.add(prompt_of(60, seed=i), client=f"new{i % 3}", max_position=62)
        world.send(), world.work(), world.receive()
        if old.id in world.finish:
            break
    assert i <= 4 * (1500 / ALIGNMENT) + 10
    world.run()


def test_one_that_needs_many_pages_is_not_passed_for_ever() -> None:
    world = World(make_plan(context=64, slots=4, pages=(17,)), alignment=8)
    world.add(prompt_of(20, seed=1), client="a", max_position=40)
    world.send()
    big = world.add(prompt_of(60), client="b", max_position=63)
    for i in range(60):
        world.add(prompt_of(8, seed=i), client=f"c{i % 4}", max_position=20)
        world.send(), world.work(), world.receive()
    assert big.state is State.FINISHED
    world.run()


def timed(world: World, step_seconds: float, token_seconds: float, far_seconds: float) -> None:
    """Make the model take time: for each Step, prompt token, and position of a prompt token."""

    def seconds(step: Step) -> float:
        tokens = [row.start + i for row in step.rows for i in range(len(row.tokens))]
        return step_seconds + token_seconds * len(tokens) + far_seconds * sum(tokens)

    world.model.seconds = seconds


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_tokens_of_a_stream_are_not_far_apart(steps_in_flight: int) -> None:
    plan = make_plan(
        context=20_000, slots=4, pages=(2000,), page_tokens=(16,), batch_tokens=1024,
        steps_in_flight=steps_in_flight,
    )  # fmt: skip
    world = World(plan, max_gap=0.25, repeats=False)
    timed(world, 0.02, 2e-4, 1e-8)
    stream = world.add([1], max_position=4000)
    for _ in range(5):
        world.send(), world.work(), world.receive()
    prompt = world.add(prompt_of(16_000), max_position=16_002)
    gaps, chunks = [], []
    while not world.tokens[prompt.id]:
        world.send()
        chunks += [len(row.tokens) for row in world.sent[-1].rows if len(row.tokens)]
        world.work()
        gaps.append(world.done[-1].seconds)
        world.receive()
    assert stream.state is State.RUNNING
    assert max(gaps) <= 0.25
    assert max(chunks) >= 768, "as much as the gap allows"
    assert min(gaps[5:-2]) > 0.16, "and not much less"
    world.cancel(stream)
    world.run()


def test_without_a_stream_the_budget_is_used_whole() -> None:
    plan = make_plan(context=4000, pages=(300,), page_tokens=(16,), batch_tokens=1024)
    world = World(plan, max_gap=0.01)
    timed(world, 0.02, 2e-4, 0.0)
    world.add(prompt_of(3000), max_position=3002)
    world.send()
    assert len(world.sent[0].rows[0].tokens) == 1024
    world.run()


def test_a_gap_that_cannot_be_kept_still_lets_prompts_on() -> None:
    plan = make_plan(context=4000, pages=(300,), page_tokens=(16,), batch_tokens=1024)
    world = World(plan, max_gap=0.0, repeats=False)
    world.add([1], max_position=1000)
    world.send(), world.work(), world.receive()
    world.add(prompt_of(300), max_position=302)
    world.send()
    assert [len(row.tokens) for row in world.sent[-1].rows] == [0, ALIGNMENT]
    world.run()


# --- everything at once -------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    windows = [draw(st.sampled_from([0, 0, 2, 7, 20])) for _ in sizes]
    context = draw(st.integers(8, 90))
    batch_tokens = draw(st.sampled_from([1, 5, 64, 65, 70, 128]))
    needs = [
        min(context - 1, window + batch_tokens + size) if window else context - 1
        for size, window in zip(sizes, windows, strict=True)
    ]
    pages = tuple(
        -(-need // size) + 2 + draw(st.integers(0, 12))
        for size, need in zip(sizes, needs, strict=True)
    )
    return make_plan(
        context=context,
        slots=draw(st.integers(1, 5)),
        pages=pages,
        page_tokens=tuple(sizes),
        windows=tuple(windows),
        batch_tokens=batch_tokens,
        steps_in_flight=draw(st.integers(1, 3)),
    )


def lonely(max_position: int, **plan: Any) -> tuple[World, Request]:
    """One request whose Step has been sent."""
    world = World(make_plan(context=256, pages=(80,), page_tokens=(64,), **plan))
    request = world.add([1, 2, 3], max_position=max_position)
    assert world.send()
    return world, request


def test_a_stream_alone_goes_on_by_itself() -> None:
    world, _ = lonely(200)
    sent = [*world.sent]
    while any([world.work(), world.receive(), world.send()]):
        sent += [each for each in world.sent if each not in sent]
    # 31 + 1 positions, to the end of the page, and so on; then to the limit.
    assert [step.rounds for step in sent] == [32, 30, 32, 32, 32, 32, 7]
    world.check_idle()


def test_the_next_step_leaves_before_the_last_round_has_answered() -> None:
    world, _ = lonely(40)
    for _ in range(30):
        assert world.work()
        assert world.receive()
        assert not world.send()
    assert world.work()
    assert world.receive()
    assert world.send()
    assert world.sent[-1].rounds == 5
    world.run()


def test_who_comes_holds_the_rounds() -> None:
    world, first = lonely(100)
    assert world.work()
    world.receive()
    second = world.add([4, 5], max_position=50)
    assert world.send()
    assert world.sent == [Hold(step=0)]
    assert not world.send(), "where the next Step begins is not known"
    assert world.work()
    assert world.receive()
    assert world.send()
    assert [row.start for row in world.sent[-1].rows] == [4, 0]
    assert (first.computed, first.ahead, second.ahead) == (36, 32, 32)
    world.run()


def test_rounds_that_are_under_way_are_waited_for() -> None:
    """A device computes two at once."""
    world, first = lonely(100)
    assert [world.read(), world.begin(), world.begin()] == [True] * 3
    world.cancel(first)
    assert world.send()
    assert world.read()
    assert not world.begin()
    assert [world.end(), world.end()] == [True] * 2
    assert [result.left for result in world.done] == [1, 0]
    world.run()


def test_each_round_costs_what_it_took() -> None:
    """The prompt is in the first one only."""
    world = World(make_plan(context=256, pages=(80,), page_tokens=(64,), batch_tokens=256))
    timed(world, 0.02, 1e-3, 0.0)
    world.add(prompt_of(100), max_position=120)
    assert world.send()
    assert world.sent[0].rounds > 1
    while not world.finish:
        world.work(), world.receive()
    costs = world.scheduler.budget.costs
    assert costs.base(1) == pytest.approx(0.02)
    assert costs.piece(0, 100) == pytest.approx(0.12), "what cannot be told apart is the prompt's"
    world.run()


def test_a_hold_may_come_too_late() -> None:
    world, _ = lonely(7)
    assert world.work()
    world.receive()
    world.add([1], max_position=9)
    assert world.send()
    assert not world.send(), "it is told once"
    assert world.sent == [Hold(step=0)]
    world.sent.clear()
    for _ in range(2):
        assert world.work()
        assert world.receive()
        assert not world.send()
    assert world.work()
    assert world.receive()
    world.run()


def test_a_row_that_ends_ends_the_rounds() -> None:
    tokens, _ = alone([1, 2, 3], Sampling(), 256)
    world = World(make_plan(context=256, pages=(80,), page_tokens=(64,)))
    world.add([1, 2, 3], max_position=100, stop_ids=[tokens[3]])
    other = world.add([7], max_position=100)
    assert world.send()
    while not world.finish:
        world.work()
        world.receive()
    assert not world.scheduler.in_flight
    assert other.computed == len(other.known) - 1
    world.run()


def test_some_streams_need_a_step_for_each_token() -> None:
    limit = ThoughtLimit(99, (), (5,), b"</think>", lambda ids: b"")
    for guide, bound in ((SimpleNamespace(mask=None), None), (None, limit)):
        world = World(make_plan(context=256))
        request = world.add([1, 2, 3], max_position=99)
        request.bind(guide, bound)  # type: ignore[arg-type]
        request.mask = np.zeros(2, np.uint32)
        assert world.send()
        assert world.sent[0].rounds == 1
    ranks = [msgspec.json.decode(b"null")] * 2
    assert not Scheduler(msgspec.structs.replace(make_plan(), ranks=ranks)).can_repeat


@pytest.mark.parametrize(("rounds", "left"), [(1, 32), (3, 30), (33, 0), (0, 31), (1, -1)])
def test_rounds_that_nobody_asked_for(rounds: int, left: int) -> None:
    world, _ = lonely(100)
    row = Sampled(slot=0, tokens=[1])
    with pytest.raises(ProtocolError, match="rounds"):
        world.scheduler.apply(Result(id=0, rows=[row], left=left, rounds=rounds))


def test_several_rounds_may_answer_at_once() -> None:
    world, request = lonely(100)
    for each in ([5], [6, 7, 8]):
        left = 32 - len(request.generated) - len(each)
        row = Sampled(slot=0, tokens=each)
        result = Result(id=0, rows=[row], left=left, rounds=len(each), seconds=0.5 * len(each))
        [(_, chunk)] = world.scheduler.apply(result)
        assert chunk.tokens == each
        assert (request.ahead, world.scheduler.in_flight[0].left) == (left, left)
    assert request.generated == [5, 6, 7, 8]
    assert world.scheduler.budget.costs.base(1) == pytest.approx(0.5), "a round's"


@settings(max_examples=300, deadline=None)
@given(
    plans(),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.01, 0.05]),
    st.sampled_from([1, 4, 64]),
    st.booleans(),
)
def test_any_interleaving_gives_each_what_it_gets_alone(
    plan: Plan, seed: int, crashes: float, alignment: int, is_poisoned: bool
) -> None:
    rng = random.Random(seed)
    gap, repeats, joins = rng.choice([0.0, 0.02, 1.0]), rng.random() < 0.8, rng.random() < 0.5
    world = World(plan, gap, alignment, repeats, joins)
    texts = [prompt_of(plan.context, seed=n) for n in range(3)]
    for _ in range(rng.randint(1, 400)):
        kind = rng.random()
        if kind < crashes:
            rng.choice([world.crash, world.forget])()
        elif kind < 0.1 and len(world.requests) < 16:
            known = rng.choice(texts + [request.known for request in world.requests])
            prompt = known[: rng.randint(1, plan.context - 1)]
            prompt = (prompt + prompt_of(rng.randint(0, 9), rng.random()))[: plan.context - 1]
            stop_ids = rng.sample(range(VOCAB), rng.choice([0, 1, 4]))
            limit = len(prompt) + rng.randint(1, plan.context)
            world.add(prompt, client=rng.choice("abc"), seed=rng.randrange(9),
                      stop_ids=stop_ids, max_position=limit)  # fmt: skip
        elif kind < 0.15 and world.scheduler.running:
            world.cancel(rng.choice(world.scheduler.running))
        elif kind < 0.17 and world.requests:
            world.cancel(rng.choice(world.requests))
        elif kind < 0.18:
            world.model.poison = rng.randrange(VOCAB) if is_poisoned else -1
        else:
            parts = [world.read, world.begin, world.end]
            rng.choice([world.send, world.send, world.receive, world.receive, *parts])()
    world.run()
    if crashes == 0 and not is_poisoned:
        assert not {"error", "crash"} & set(world.finish.values())
