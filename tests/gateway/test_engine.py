"""The engine with fake workers: real processes that die, or a socket that the test holds."""

import asyncio
import importlib.util
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import zmq
import zmq.asyncio
from voltapile.gateway.engine import Engine, EngineUnavailable, Refused
from voltapile.gateway.request import State
from voltapile.gateway.stream import Stream
from voltapile.gateway.supervisor import Restarts, Supervisor
from voltapile.topology.plan import CacheGroup, Plan, RankPlan, plan_id, to_json
from voltapile.topology.share import Share
from voltapile.workers.protocol import (
    Failed,
    Hold,
    Message,
    Ready,
    Result,
    Sampling,
    Stats,
    Step,
    Stop,
    decode,
    encode,
)
from voltapile.workers.rounds import Rounds

SCRIPT = Path(__file__).with_name("fake_worker.py")


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fake_worker", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SHARE = Share(layers=[0], heads=(0, 1), kv_heads=(0, 1), head_map=[0], ffn=(0, 1), vocab=(0, 1))
fake = load_script()


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    cache = CacheGroup(
        kind="full", layers=[0], kv_heads=1, key_dim=8, value_dim=8, window=0, key_type="f16",
        value_type="f16", page_tokens=4, page_bytes=1, pages=200,
    )  # fmt: skip
    rank = RankPlan(
        rank=0, device="cpu", node=0, cpus=[0], threads=1, memory={}, mapped_bytes=0,
        share=SHARE, page_bytes=[1],
    )  # fmt: skip
    bare = Plan(
        model=["m"], alias="m", architecture="llama", backend="cpu",
        endpoint=f"ipc://{tmp_path}/s", context=256, slots=2, batch_tokens=128, buckets=[1],
        steps_in_flight=2, answer_rank=0, ranks=[rank], caches=[cache], tensors={},
    )  # fmt: skip
    return msgspec.structs.replace(bare, id=plan_id(bare))


class FileVitals:
    """A fake worker touches a file instead of the Board."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def age(self) -> float | None:
        return time.time() - self.path.stat().st_mtime if self.path.exists() else None

    def quietest(self) -> str:
        return "the worker"

    def begin(self) -> None:
        pass

    def abort(self, reason: str) -> None:
        pass


@asynccontextmanager
async def spawned(
    plan: Plan, tmp_path: Path, *options: str, restarts: Restarts | None = None
) -> AsyncIterator[tuple[Engine, Supervisor]]:
    path, heartbeat = tmp_path / "plan.json", tmp_path / "heartbeat"
    path.write_bytes(to_json(plan))

    command = [sys.executable, str(SCRIPT), str(path), "--heartbeat", str(heartbeat), *options]
    supervisor = Supervisor([command])
    vitals = FileVitals(heartbeat)
    async with Engine(plan, supervisor, vitals, 1.0, restarts or Restarts(pause=0.01)) as engine:
        yield engine, supervisor


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def is_ok(engine: Engine) -> Callable[[], bool]:
    return lambda: engine.health.status == "ok"


async def collect(stream: Stream) -> tuple[list[int], str]:
    tokens: list[int] = []
    async with asyncio.timeout(30):
        async for chunk in stream:
            tokens += chunk.tokens
            if chunk.finish:
                return tokens, chunk.finish + chunk.error
    raise AssertionError("a stream without an end")


async def test_two_streams_get_what_they_get_alone(plan: Plan, tmp_path: Path) -> None:
    async with spawned(plan, tmp_path) as (engine, _):
        assert engine.health.status == "loading"
        with pytest.raises(EngineUnavailable):
            engine.submit([1], Sampling())
        await until(is_ok(engine))
        streams = [engine.submit([i], Sampling(seed=i, max_position=41)) for i in range(3)]
        results = await asyncio.gather(*map(collect, streams))
        assert results == [(fake.alone([i], 40, i), "length") for i in range(3)]
        stats = engine.stats()
        assert (stats.requests, stats.prompt_tokens, stats.generated_tokens) == (3, 3, 120)
        assert stats.computed_tokens == 3
        assert (stats.running, stats.waiting, stats.restarts) == (0, 0, 0)
        assert stats.pages_free == stats.pages_total == 199


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_worker_loses_and_repeats_no_token(
    plan: Plan, tmp_path: Path, number: signal.Signals
) -> None:
    async with spawned(plan, tmp_path, "--step-seconds", "0.01") as (engine, supervisor):
        await until(is_ok(engine))
        stream = engine.submit([5, 6], Sampling(max_position=102))
        other = engine.submit([7], Sampling(max_position=61))
        reading = asyncio.gather(collect(stream), collect(other))
        await until(lambda: engine.stats().generated_tokens > 10)
        os.kill(supervisor.pids[0], number)
        await until(lambda: engine.health.status == "loading")
        assert engine.health.reason
        with pytest.raises(EngineUnavailable, match="loading"):
            engine.submit([1], Sampling())
        assert await reading == [
            (fake.alone([5, 6], 100), "length"),
            (fake.alone([7], 60), "length"),
        ]
        assert engine.health.status == "ok"
        assert engine.stats().restarts == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_worker_lost_while_it_loads(
    plan: Plan, tmp_path: Path, number: signal.Signals
) -> None:
    async with spawned(plan, tmp_path, "--load-seconds", "0.5") as (engine, supervisor):
        await until(lambda: engine.health.stage == "weights")
        began, pid = time.monotonic(), supervisor.pids[0]
        os.kill(pid, number)
        await until(lambda: engine.stats().restarts == 1)
        assert time.monotonic() - began < 3
        await until(is_ok(engine))
        assert supervisor.pids != [pid]
        stream = engine.submit([1], Sampling(max_position=9))
        assert await collect(stream) == (fake.alone([1], 8), "length")


async def test_a_worker_lost_during_prefill(plan: Plan, tmp_path: Path) -> None:
    prompt = list(range(200))
    async with spawned(plan, tmp_path, "--step-seconds", "0.3") as (engine, supervisor):
        await until(is_ok(engine))
        stream = engine.submit(prompt, Sampling(max_position=204))
        await asyncio.sleep(0.1)
        os.kill(supervisor.pids[0], signal.SIGKILL)
        assert await collect(stream) == (fake.alone(prompt, 4), "length")
        assert engine.stats().restarts == 1


async def test_a_request_that_kills_the_worker_ends_alone(plan: Plan, tmp_path: Path) -> None:
    options = ("--poison", "599", "--step-seconds", "0.01")
    async with spawned(plan, tmp_path, *options, restarts=Restarts(2, pause=0.01)) as (engine, _):
        await until(is_ok(engine))
        good = engine.submit([5, 6], Sampling(max_position=102))
        reading = asyncio.create_task(collect(good))
        await until(lambda: engine.stats().generated_tokens > 3)
        bad = engine.submit([5, 599], Sampling(max_position=50))
        tokens, finish = await collect(bad)
        assert tokens == []
        assert finish.startswith("error")
        assert "at each try" in finish
        assert await reading == (fake.alone([5, 6], 100), "length")
        assert engine.stats().restarts == 2
        await until(is_ok(engine))
        other = engine.submit([5, 6], Sampling(max_position=10))
        assert await collect(other) == (fake.alone([5, 6], 8), "length")


async def test_a_prompt_seen_before_is_shared(plan: Plan, tmp_path: Path) -> None:
    prompt = list(range(150))
    async with spawned(plan, tmp_path) as (engine, _):
        await until(is_ok(engine))
        for cached in (0, 128):
            stream = engine.submit(prompt, Sampling(max_position=170), client="somebody")
            assert await collect(stream) == (fake.alone(prompt, 20), "length")
            assert stream.cached_tokens == cached
        assert engine.stats().cached_tokens == 128
        assert engine.stats().pages_free == engine.stats().pages_total


async def test_a_client_that_leaves_during_prefill(plan: Plan, tmp_path: Path) -> None:
    async with spawned(plan, tmp_path, "--step-seconds", "0.05") as (engine, _):
        await until(is_ok(engine))
        gone = engine.submit(list(range(250)), Sampling(max_position=252))
        other = engine.submit([7], Sampling(max_position=20))
        await asyncio.sleep(0.02)
        gone.cancel()
        assert await collect(gone) == ([], "cancelled")
        assert await collect(other) == (fake.alone([7], 19), "length")
        assert engine.stats().running == 0


async def test_cancel_frees_the_slot(plan: Plan, tmp_path: Path) -> None:
    async with spawned(plan, tmp_path, "--step-seconds", "0.01") as (engine, _):
        await until(is_ok(engine))
        long = [engine.submit([i], Sampling()) for i in range(2)]
        queued = engine.submit([2], Sampling(max_position=6))
        gone = engine.submit([3], Sampling())
        gone.cancel()
        assert await collect(gone) == ([], "cancelled")
        await until(lambda: engine.stats().generated_tokens > 4)
        assert engine.stats().waiting == 1
        steps = engine.stats().steps
        long[0].cancel()
        long[0].cancel()
        assert await collect(queued) == (fake.alone([2], 5), "length")
        assert engine.stats().steps <= steps + 5 + 2
        tokens, finish = await collect(long[0])
        assert finish == "cancelled"
        assert tokens == fake.alone([0], len(tokens))
        assert engine.stats().running == 1


async def test_a_refusal_is_no_work(plan: Plan, tmp_path: Path) -> None:
    async with spawned(plan, tmp_path) as (engine, _):
        await until(is_ok(engine))
        with pytest.raises(Refused, match="context"):
            engine.submit([0] * 256, Sampling())
        assert engine.stats().requests == 0


async def test_what_cannot_be_loaded_is_not_tried_again(plan: Plan, tmp_path: Path) -> None:
    async with spawned(plan, tmp_path, "--fail", "bad file") as (engine, supervisor):
        await until(lambda: engine.health.status == "failed")
        assert engine.health.reason == "bad file"
        await asyncio.sleep(0.3)
        assert supervisor.pids == []
        assert engine.health.status == "failed"
        with pytest.raises(EngineUnavailable, match="bad file"):
            engine.submit([1], Sampling())


async def test_a_worker_that_dies_loading_is_tried_a_few_times(plan: Plan, tmp_path: Path) -> None:
    restarts = Restarts(limit=1, pause=0.01)
    async with spawned(plan, tmp_path, "--die", "3", restarts=restarts) as (engine, _):
        await until(lambda: engine.health.status == "failed")
        assert engine.health.reason == "the worker ended with exit code 3: the last words"
        assert engine.stats().restarts == 2


async def test_streams_end_with_an_error_when_the_engine_gives_up(
    plan: Plan, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    options = ("--die-if", str(broken), "--step-seconds", "0.02")
    restarts = Restarts(limit=1, pause=0.01)
    async with spawned(plan, tmp_path, *options, restarts=restarts) as (engine, supervisor):
        await until(is_ok(engine))
        stream = engine.submit([1], Sampling())
        await anext(stream)
        broken.touch()
        os.kill(supervisor.pids[0], signal.SIGKILL)
        finish = (await collect(stream))[1]
        assert finish.startswith("errorthe worker ended with exit code 4")
        assert engine.health.status == "failed"
        assert engine.health.reason.startswith("the worker ended with exit code 4")
        assert engine.stats().restarts == 3  # of a ready one, and twice when loading


async def test_a_worker_that_somebody_kills_again_and_again(plan: Plan, tmp_path: Path) -> None:
    prompt = list(range(200))
    async with spawned(plan, tmp_path, "--step-seconds", "0.3") as (engine, supervisor):
        await until(is_ok(engine))
        stream = engine.submit(prompt, Sampling(max_position=204))
        for _ in range(4):  # each time before its first token
            await until(is_ok(engine))
            await asyncio.sleep(0.1)
            os.kill(supervisor.pids[0], signal.SIGKILL)
            await until(lambda: engine.health.status == "loading")
        assert await collect(stream) == (fake.alone(prompt, 4), "length")
        assert engine.stats().restarts == 4


async def test_any_number_of_poisonous_requests(plan: Plan, tmp_path: Path) -> None:
    options = ("--poison", "599", "--step-seconds", "0.02")
    restarts = Restarts(2, pause=0.01, longest=0.02)
    async with spawned(plan, tmp_path, *options, restarts=restarts) as (engine, _):
        await until(is_ok(engine))
        reading = asyncio.create_task(collect(engine.submit([5, 6], Sampling(max_position=252))))
        bad = []
        for i in range(6):
            await until(is_ok(engine))
            bad.append(engine.submit([i, 599], Sampling(max_position=50)))
        ends = [await collect(stream) for stream in bad]
        assert all("at each try" in finish for _, finish in ends)
        assert not reading.done()
        assert await reading == (fake.alone([5, 6], 250), "length")
        assert engine.health.status == "ok"
        assert engine.stats().restarts >= 7


async def test_leaving_ends_streams_and_processes(plan: Plan, tmp_path: Path) -> None:
    async with spawned(plan, tmp_path, "--step-seconds", "0.01") as (engine, supervisor):
        await until(is_ok(engine))
        stream = engine.submit([1], Sampling())
        await until(lambda: engine.stats().generated_tokens > 0)
        pid = supervisor.pids[0]
        began = time.monotonic()
    assert time.monotonic() - began < 3
    assert (await collect(stream))[1] == "cancelled"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


class Hand:
    """A worker that the test moves by hand."""

    def __init__(self, plan: Plan, name: str = "text-0") -> None:
        self.plan, self.name = plan, name
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.IDENTITY, name.encode())
        self.socket.connect(plan.endpoint)
        self.model = fake.FakeModel()
        self.tasks: list[asyncio.Task[None]] = []

    async def say(self, message: Message) -> None:
        await self.socket.send_multipart(encode(message))

    async def ready(self, instance: int = 1) -> None:
        await self.say(Ready(name=self.name, plan=self.plan.id, instance=instance))

    async def hear(self) -> Message:
        async with asyncio.timeout(5):
            return decode(await self.socket.recv_multipart())

    async def step(self) -> Step:
        message = await self.hear()
        assert isinstance(message, Step)
        return message

    async def is_silent(self) -> bool:
        return not await self.socket.poll(100)

    def serve(self) -> None:
        """Answer every Step until told to end."""
        self.tasks.append(asyncio.create_task(self._serve()))

    async def _serve(self) -> None:
        rounds = Rounds()
        while not isinstance(message := await self.hear(), Stop):
            if isinstance(message, Hold):
                rounds.hold(message.step)
            else:
                assert isinstance(message, Step)
                rounds.add(message)
            while rounds and not await self.socket.poll(0):
                await self.say(self.round(rounds))

    def round(self, rounds: Rounds) -> Result:
        result: Result = self.model.run(rounds.next())
        rounds.settle(result)
        return result


@asynccontextmanager
async def by_hand(plan: Plan) -> AsyncIterator[tuple[Engine, Hand]]:
    hand = Hand(plan)
    try:
        async with Engine(plan) as engine:
            yield engine, hand
        for task in hand.tasks:
            await task
    finally:
        hand.context.destroy(0)


async def test_step_n_plus_1_leaves_before_result_n(plan: Plan) -> None:
    async with by_hand(plan) as (engine, hand):
        await hand.say(Stats(name="text-0", values={"stage": "weights", "fraction": 0.25}))
        await until(lambda: engine.health.stage == "weights")
        assert engine.health.fraction == 0.25
        await hand.ready()
        await until(is_ok(engine))
        engine._scheduler.can_repeat = False
        streams = [engine.submit([i], Sampling(max_position=5)) for i in range(2)]
        first, second = await hand.step(), await hand.step()
        assert [row.slot for row in first.rows] == [0, 1], "what comes together goes together"
        assert await hand.is_silent()
        await hand.ready()  # it crossed the first Step
        await hand.say(hand.model.run(first))
        third = await hand.step()
        assert [step.id for step in (first, second, third)] == [0, 1, 2]
        for step in (second, third):
            await hand.say(hand.model.run(step))
        hand.serve()
        results = await asyncio.gather(*map(collect, streams))
        assert results == [(fake.alone([i], 4), "length") for i in range(2)]
        assert engine.stats().restarts == 0
        assert engine.stats().step_seconds == 0.001


async def test_chunks_tell_what_workers_spent_behind_the_first_token(plan: Plan) -> None:
    async with by_hand(plan) as (engine, hand):
        await hand.ready()
        await until(is_ok(engine))
        stream, rounds = engine.submit([1, 2], Sampling(max_position=5)), Rounds()
        for _ in range(3):
            if not rounds:
                rounds.add(await hand.step())
            result = hand.round(rounds)
            result.seconds = 0.5
            await hand.say(result)
        await until(lambda: stream.request.state is State.FINISHED)
        [chunk] = [each async for each in stream]
        assert (len(chunk.tokens), chunk.seconds) == (3, 1.0)


async def test_who_comes_or_leaves_ends_the_rounds(plan: Plan) -> None:
    caches = [msgspec.structs.replace(cache, page_tokens=64) for cache in plan.caches]
    async with by_hand(msgspec.structs.replace(plan, caches=caches)) as (engine, hand):
        hand.model = fake.FakeModel(64)
        await hand.ready()
        await until(is_ok(engine))
        first, rounds = engine.submit([1], Sampling(max_position=90)), Rounds()
        rounds.add(await hand.step())
        await hand.say(hand.round(rounds))
        assert await hand.is_silent()
        second = engine.submit([2], Sampling(max_position=4))
        assert await hand.hear() == Hold(step=0)
        rounds.hold(0)
        await hand.say(hand.round(rounds))
        rounds.add(await hand.step())
        for _ in range(3):
            await hand.say(hand.round(rounds))
        assert await collect(second) == (fake.alone([2], 3), "length")
        rounds.add(await hand.step())  # it left before the second's last token was here
        rounds.add(await hand.step())
        first.cancel()
        assert await hand.hear() == Hold(step=3)
        rounds.hold(3)
        while rounds:
            await hand.say(hand.round(rounds))
        await until(lambda: engine.stats().pages_free == engine.stats().pages_total)
        assert (await collect(first))[0] == fake.alone([1], 5)


# The same worker's Ready before its first answer would look like one that crossed the first Step.
@pytest.mark.parametrize(("instance", "has_answered"), [(1, True), (2, False), (2, True)])
async def test_a_worker_that_is_ready_anew_gets_all_again(
    plan: Plan, has_answered: bool, instance: int
) -> None:
    async with by_hand(plan) as (engine, hand):
        await hand.ready()
        await until(is_ok(engine))
        stream = engine.submit([1, 2], Sampling(max_position=12))
        step = await hand.step()
        if has_answered:
            await hand.say(hand.model.run(step))
        await hand.ready(instance)
        hand.model = fake.FakeModel()
        while not (step := await hand.step()).rows[0].sampling:
            pass
        await hand.say(hand.model.run(step))
        hand.serve()
        assert await collect(stream) == (fake.alone([1, 2], 10), "length")
        assert engine.stats().restarts == 1


async def test_ready_is_repeated_while_idle(plan: Plan) -> None:
    async with by_hand(plan) as (engine, hand):
        for _ in range(3):
            await hand.ready()
        await until(is_ok(engine))
        assert engine.stats().restarts == 0
        assert await hand.is_silent()


async def test_another_plan_is_refused_and_the_right_one_taken(plan: Plan) -> None:
    async with by_hand(plan) as (engine, hand):
        await hand.say(Ready(name="text-0", plan="other"))
        assert isinstance(await hand.hear(), Stop)
        assert engine.health.status == "failed"
        assert "plan other" in engine.health.reason
        await hand.ready()
        await until(is_ok(engine))


async def test_ranks_that_have_all_met_anew_are_taken(plan: Plan) -> None:
    """Their end was not heard of: the first that is ready says it."""
    first = plan.ranks[0]
    second = msgspec.structs.replace(first, rank=1)
    plan = msgspec.structs.replace(plan, ranks=[first, second])
    engine = Engine(plan)
    for rank in range(2):
        engine._handle(f"text-{rank}", Ready(name=f"text-{rank}", plan=plan.id, instance=rank))
    assert engine.health.status == "ok"
    engine._handle("text-1", Ready(name="text-1", plan=plan.id, instance=7))
    assert (engine.health.status, engine.health.reason) == ("loading", "text-1 was started again")
    engine._handle("text-0", Ready(name="text-0", plan=plan.id, instance=8))
    assert engine.health.status == "ok"
    assert engine.stats().restarts == 1


async def test_last_words_of_other_ranks_are_no_further_loss(plan: Plan) -> None:
    first = plan.ranks[0]
    plan = msgspec.structs.replace(plan, ranks=[first, msgspec.structs.replace(first, rank=1)])
    engine = Engine(plan)
    for rank in range(2):
        engine._handle(f"text-{rank}", Ready(name=f"text-{rank}", plan=plan.id, instance=rank))
    engine._send = lambda message: None  # type: ignore[method-assign]
    for rank in (1, 0):
        said = Failed(name=f"text-{rank}", step=3, reason="rank 1: over", cause="stopped")
        engine._handle(said.name, said)
    assert engine.stats().restarts == 1


async def test_a_rank_that_ends_because_another_cannot_load(plan: Plan) -> None:
    """That one tells why, and it cannot be helped."""
    engine = Engine(plan)
    engine._handle("text-0", Failed(name="text-0", step=0, reason="rank 1: no room"))
    assert engine.health.status == "loading"
    engine._handle("text-0", Failed(name="text-0", reason="no room"))
    assert (engine.health.status, engine.health.reason) == ("failed", "no room")


@pytest.mark.parametrize(("cause", "losses"), [("", 2), ("gone", 2), ("stopped", 6)])
async def test_what_a_loss_counts_follows_its_cause(plan: Plan, cause: str, losses: int) -> None:
    engine = Engine(plan)
    engine._send = lambda message: None  # type: ignore[method-assign]
    for i in range(losses):
        engine._handle("text-0", Ready(name="text-0", plan=plan.id, instance=i))
        if not i:
            stream = engine.submit([1], Sampling(max_position=9))
        engine._pump()
        assert stream.request.state is not State.FINISHED, i
        engine._handle("text-0", Failed(name="text-0", step=1, reason="over", cause=cause))
    assert stream.request.state is State.FINISHED


@pytest.mark.parametrize("was_ready", [False, True])
async def test_a_worker_that_takes_leave_is_waited_for(plan: Plan, was_ready: bool) -> None:
    """Nobody starts it again but who started it; a stop while it loads is no fault either."""
    async with by_hand(plan) as (engine, hand):
        if was_ready:
            await hand.ready()
            await until(is_ok(engine))
        reason, step = "text-0 was ended: got SIGTERM", 0 if was_ready else -1
        await hand.say(Failed(name="text-0", step=step, reason=reason, cause="stopped"))
        await until(lambda: engine.health.reason == reason)
        assert (engine.health.status, engine.health.stage) == ("loading", "waiting for the worker")


async def test_how_a_rank_is_gone_is_for_the_supervisor_to_say(plan: Plan) -> None:
    engine = Engine(plan, Supervisor([]))
    engine._handle("text-0", Ready(name="text-0", plan=plan.id))
    engine._handle("text-0", Failed(name="text-0", step=1, reason="rank 1 is gone", cause="gone"))
    assert engine.health.status == "ok"
    engine._handle("text-0", Failed(name="text-0", step=1, reason="no room"))
    assert engine.health.reason == "no room"


async def test_a_worker_that_failed_in_a_step_is_told_to_end(plan: Plan) -> None:
    async with by_hand(plan) as (engine, hand):
        await hand.ready()
        await until(is_ok(engine))
        stream = engine.submit([1], Sampling(max_position=9))
        await hand.step()
        await hand.say(Failed(name="text-0", step=0, reason="out of luck"))
        assert isinstance(await hand.hear(), Stop)
        assert (engine.health.status, engine.health.reason) == ("loading", "out of luck")
        hand.model = fake.FakeModel()
        await hand.ready(2)
        hand.serve()
        assert await collect(stream) == (fake.alone([1], 8), "length")


@pytest.mark.parametrize(
    "frames", [[b""], [b"\x09"], [b"\x01junk"], encode(Stop()), encode(Result(id=7))]
)
async def test_nonsense_from_a_worker(plan: Plan, frames: list[bytes]) -> None:
    async with by_hand(plan) as (engine, hand):
        await hand.ready()
        await until(is_ok(engine))
        engine.submit([1], Sampling(max_position=9))
        await hand.step()
        await hand.socket.send_multipart(frames)
        assert isinstance(await hand.hear(), Stop)
        assert "does not speak as agreed" in engine.health.reason


async def test_a_stranger_is_ignored(plan: Plan) -> None:
    async with by_hand(plan) as (engine, _):
        stranger = Hand(plan, "text-9")
        await stranger.ready()
        await asyncio.sleep(0.2)
        stranger.context.destroy(0)
        assert engine.health.status == "loading"


async def test_an_address_that_cannot_be_used(plan: Plan) -> None:
    bad = msgspec.structs.replace(plan, endpoint="ipc:///nowhere/at/all")
    with pytest.raises(OSError, match="cannot listen"):
        async with Engine(bad):
            pass


async def test_two_gateways_do_not_share_an_address(plan: Plan) -> None:
    async with by_hand(plan) as (engine, hand):
        with pytest.raises(OSError, match="another gateway"):
            async with Engine(plan):
                pass
        await hand.ready()
        await until(is_ok(engine))
