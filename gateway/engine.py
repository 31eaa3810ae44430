"""Engine: the gateway's side of the workers. Owns the Wire and the scheduler.

Event-driven: whenever a request arrives or a Result comes, Steps leave until as many are in flight
as the Plan allows. A lost worker sends every running request back to its known tokens; open streams
go on when a worker is ready again. Knows token ids only: no text, no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Self

from voltapile.gateway.crew import UNHEARD, Crew
from voltapile.gateway.grammar import Guide
from voltapile.gateway.guides import Guides
from voltapile.gateway.health import EngineStats, EngineUnavailable, Health
from voltapile.gateway.request import Chunk, Refused, Request
from voltapile.gateway.scheduler import Scheduler
from voltapile.gateway.stream import Stream
from voltapile.gateway.supervisor import Restarts, Supervisor, is_taken
from voltapile.gateway.suspects import FAULT, KILL
from voltapile.gateway.thought import ThoughtLimit
from voltapile.gateway.watchdog import Vitals, Watchdog
from voltapile.gateway.wire import Wire
from voltapile.topology.endpoint import prepare
from voltapile.topology.plan import Plan
from voltapile.workers.protocol import (
    Failed,
    Message,
    ProtocolError,
    Ready,
    Result,
    Sampling,
    Stats,
    Stop,
    Want,
    decode,
    encode,
)

__all__ = ["Chunk", "Engine", "EngineStats", "EngineUnavailable", "Health", "Refused", "Stream"]

log = logging.getLogger(__name__)

RACE_SECONDS = 2.0  # a Ready that crossed the first Step on its way is at most this late
WATCH_SECONDS = 0.25
LAST_WORDS_SECONDS = 0.05  # a dead worker's last message may still be on its way
SILENT_STEP_SECONDS = 600.0  # longest Step of a worker that has no heartbeat


class Engine:
    """async with Engine(plan) as engine: ...

    supervisor None: the workers are started by someone else. vitals: who is alive; a silence of
    more than heartbeat_seconds is a dead rank.
    max_gap: seconds between two tokens of a stream while prompts are computed.
    interval: seconds for which tokens may wait for the next ones, where nobody has to act on them.
    """

    def __init__(
        self,
        plan: Plan,
        supervisor: Supervisor | None = None,
        vitals: Vitals | None = None,
        heartbeat_seconds: float = 4.0,
        restarts: Restarts | None = None,
        max_gap: float = 0.25,
        interval: float = 0.0,
    ) -> None:
        self.plan = plan
        self._interval = interval
        self._supervisor = supervisor
        self._vitals = vitals
        self._watchdog = Watchdog(vitals, supervisor, heartbeat_seconds)
        self._restarts = restarts or Restarts()
        self._scheduler = Scheduler(plan, max_gap)
        self._guides = Guides(self._pump, self._cancel)
        self._streams: dict[int, Stream] = {}
        self._crew = Crew(plan)
        self._health = Health("loading", UNHEARD)
        self._stats = EngineStats()
        self._sent_at = 0.0  # when the oldest Step in flight left
        self._alive_at = time.monotonic()  # when workers were started or ready
        self._has_answered = False  # a Result came since the workers were ready
        self._was_ready = False  # workers have been, at any time
        self._have_loaded = False  # these workers have
        self._failure = ""  # what the workers said before they ended
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        prepare(self.plan.endpoint)
        if is_taken(self.plan.endpoint):
            raise OSError(f"another gateway listens at {self.plan.endpoint}")
        self._wire = Wire(self.plan.endpoint, self._receive)
        self._wire.open()
        self._tasks = [asyncio.create_task(self._watch())]
        if self._supervisor is not None:
            self._tasks.append(asyncio.create_task(self._keep_alive(self._supervisor)))
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for request in self._scheduler.clear():
            self._end(request, Chunk(finish="cancelled"))
        self._health = Health("loading", "stopping")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._send(Stop(reason="the gateway ends"))
        if self._supervisor is not None:
            await self._supervisor.stop()
        self._wire.close()
        self._guides.close()

    # --- what the HTTP layer calls --------------------------------------------------------

    def submit(
        self, prompt: list[int], sampling: Sampling, want: Want | None = None, client: str = "",
        salt: bytes = b"", guide: Guide | None = None, limit: ThoughtLimit | None = None,
    ) -> Stream:  # fmt: skip
        """Raises Refused or EngineUnavailable. sampling.max_position: len(prompt) + max_tokens, cut
        to the context. client: who asks; they take turns. salt: only its prompts share pages.
        guide, limit: what the answer must keep to."""
        if self._health.status != "ok":
            raise EngineUnavailable(self._unavailable())
        request = self._scheduler.add(prompt, sampling, want, client, salt)
        request.bind(guide, limit)
        stream = self._streams[request.id] = Stream(request, self._cancel)
        self._stats.requests += 1
        self._stats.prompt_tokens += len(prompt)
        # Later in this turn of the loop, so that requests that come together share a Step.
        asyncio.get_running_loop().call_soon(self._pump)
        return stream

    @property
    def health(self) -> Health:
        return self._health

    @property
    def memory(self) -> dict[int, dict[str, tuple[int, int]]]:
        """(planned, allocated) bytes of each rank by purpose, once it has loaded."""
        return self._crew.memory

    @property
    def status_ports(self) -> list[int]:
        """Where workers of this machine tell their own metrics."""
        is_here = self.plan.endpoint.startswith("ipc://")
        return list(self._crew.ports.values()) if is_here else []

    def stats(self) -> EngineStats:
        return replace(
            self._stats,
            cached_tokens=self._scheduler.cached_tokens,
            preemptions=self._scheduler.preemptions,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            pages_free=sum(pool.free for pool in self._scheduler.pools),
            pages_total=sum(pool.total for pool in self._scheduler.pools),
        )

    def _unavailable(self) -> str:
        health = self._health
        if health.status == "failed":
            return f"the model is not available: {health.reason}"
        return f"the model is loading ({health.stage}, {health.fraction:.0%})"

    # --- streams --------------------------------------------------------------------------

    def _cancel(self, request: Request, error: str = "", finish: str = "cancelled") -> None:
        if self._scheduler.cancel(request.id) is not None:
            self._end(request, Chunk(finish=finish, error=error))
            self._pump()

    def _end(self, request: Request, chunk: Chunk) -> None:
        self._streams.pop(request.id).put(chunk)

    # --- steps out, messages in -----------------------------------------------------------

    def _pump(self) -> None:
        """Send Steps until enough are in flight. Step n + 1 leaves before Result n is here."""
        if self._health.status != "ok":
            return
        while (step := self._scheduler.schedule()) is not None:
            if len(self._scheduler.in_flight) == 1:
                self._sent_at = time.monotonic()
            if step.rounds > 1:
                step.interval = self._interval
            self._send(step)
        if (hold := self._scheduler.hold()) is not None:
            self._send(hold)

    def _send(self, message: Message) -> None:
        # What is sent to nobody is dropped, and _watch or a new Ready finds that out.
        frames = encode(message)
        for name in self._crew.names:
            self._wire.send(name, frames)

    def _receive(self, name: str, frames: list[bytes]) -> None:
        if name not in self._crew.names:
            log.warning("a message from %r, which is not in the plan", name)
            return
        try:
            message = decode(frames)
            if type(message) is not Result:
                self._handle(name, message)
            elif name == self._crew.answers:
                self._take(message)
        except ProtocolError as error:
            self._lose(f"{name} does not speak as agreed: {error}")
        except Exception as error:
            self._broken(error)

    def _handle(self, name: str, message: Message) -> None:
        match message:
            case Ready():
                self._take_ready(name, message)
            case Stats():
                self._crew.hear(message)
                if self._health.status == "loading":
                    self._progress()
            case Failed():
                self._take_failed(name, message)
            case _:
                raise ProtocolError(f"a {type(message).__name__} from a worker")

    def _take(self, result: Result) -> None:
        stats = self._stats
        oldest = self._scheduler.in_flight[0].step if self._scheduler.in_flight else -1
        chunks = self._scheduler.apply(result)
        if result.id == oldest:
            self._has_answered, self._sent_at = True, time.monotonic()
            stats.steps += result.rounds
            stats.step_seconds = result.seconds / result.rounds
            stats.busy_seconds += result.seconds
        if result.left < 2:  # otherwise the worker goes on by itself
            self._guides.follow(chunks)
            self._pump()
        for request, chunk in chunks:
            stats.generated_tokens += len(chunk.tokens)
            if len(request.known) > len(request.prompt) + len(chunk.tokens):
                chunk.seconds = result.seconds
            else:
                stats.computed_tokens += len(request.prompt) - request.cached
            if chunk.finish:
                self._end(request, chunk)
            else:
                self._streams[request.id].put(chunk)

    def _progress(self) -> None:
        stage, fraction = self._crew.slowest()
        ranks = tuple(self._crew.progress()) if len(self._crew.names) > 1 else ()
        self._health = replace(self._health, stage=stage, fraction=fraction, ranks=ranks)

    # --- workers come and go --------------------------------------------------------------

    def _take_ready(self, name: str, ready: Ready) -> None:
        if ready.plan != self.plan.id:
            reason = f"{name} runs plan {ready.plan}, and the gateway plan {self.plan.id}"
            if self._crew.is_empty:
                self._give_up(reason)
            self._send(Stop(reason=reason))
            return
        if self._crew.has(name) and not self._is_news(name, ready):
            return
        self._crew.take(ready)
        if not self._crew.is_complete:
            if self._health.status == "loading":
                self._progress()
        else:
            self._health = Health("ok")
            self._has_answered, self._failure = False, ""
            self._was_ready = self._have_loaded = True
            self._alive_at = time.monotonic()
            self._pump()

    def _is_news(self, name: str, ready: Ready) -> bool:
        """A worker that is ready says so until it gets a Step, and again when it lost its slots."""
        is_same = self._crew.is_known(ready)
        if is_same and not self._scheduler.in_flight:
            self._has_answered = False
            return False
        waited = self._step_seconds(time.monotonic())
        if is_same and not self._has_answered and waited < RACE_SECONDS:
            return False  # it crossed the first Step on its way
        if is_same and len(self._crew.names) > 1:  # the others have not
            self._lose(f"{name} lost its slots")
            return False
        # Ranks meet anew when one of them has ended, so the others of this one come, too.
        self._reset(f"{name} lost its slots" if is_same else f"{name} was started again")
        return True

    def _take_failed(self, name: str, failed: Failed) -> None:
        if failed.step >= 0 and not self._was_ready:
            return  # it follows from what another rank met while loading, and tells itself
        if failed.step >= 0 and not self._crew.has(name):
            return  # last words of a crew that is given up already
        if failed.cause == "gone" and self._supervisor is not None:
            return  # whose process that was sees how it has ended, and tells _keep_alive
        self._failure = " ".join(failed.reason.split()) or f"{name} failed without a reason"
        if failed.step < 0 and not self._was_ready and failed.cause != "stopped":
            self._give_up(self._failure)  # what cannot be loaded now cannot be loaded later
        else:
            self._lose(self._failure, KILL if failed.cause == "stopped" else FAULT)

    def _reset(self, reason: str, weight: int = FAULT) -> None:
        log.warning("worker lost: %s", reason)
        self._stats.restarts += 1
        for request in self._scheduler.reset(weight):
            log.error("request %d ends: it was running at each crash", request.id)
            error = f"{reason} (at each try of this request)"
            self._end(request, Chunk(finish="error", error=error))
        self._crew.forget()
        stage = UNHEARD if self._supervisor is None else "restarting"
        self._health = Health("loading", stage, 0.0, reason)

    def _lose(self, reason: str, weight: int = FAULT) -> None:
        """The workers are of no use any more: running requests wait for the next ones."""
        if self._health.status == "failed":
            return
        self._failure = reason
        self._reset(reason, weight)
        if self._supervisor is not None:
            self._supervisor.kill()
            return
        self._send(Stop(reason=reason))
        if self._vitals is not None and len(self._crew.names) > 1:
            self._vitals.abort(reason)  # those that wait for one of them read no message

    def _give_up(self, reason: str) -> None:
        """Open streams end with an error; only a worker that someone else starts can help."""
        log.error("the engine failed: %s", reason)
        self._crew.forget()
        self._health = Health("failed", reason=reason)
        if self._supervisor is not None:
            self._supervisor.kill()
        for request in self._scheduler.clear():
            self._end(request, Chunk(finish="error", error=reason))

    async def _keep_alive(self, supervisor: Supervisor) -> None:
        """Start the workers, and start them again when they end."""
        while self._health.status != "failed":
            self._failure, self._alive_at = "", time.monotonic()
            self._have_loaded = False
            if self._vitals is not None:
                self._vitals.begin()
            try:
                await supervisor.start()
                reason = await supervisor.wait()
                await asyncio.sleep(LAST_WORDS_SECONDS)
            except OSError as error:
                reason = f"cannot start the worker: {error}"
            if not self._failure:  # nobody has noticed yet
                self._lose(reason, KILL if supervisor.was_killed else FAULT)
            pause = self._restarts.next_pause(time.monotonic(), self._have_loaded)
            if pause is not None:
                await asyncio.sleep(pause)
            elif self._health.status != "failed":
                self._give_up(self._failure)

    async def _watch(self) -> None:
        """Find ranks that neither end nor go on."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            wrong = self._watchdog.complaint(now, self._alive_at, self._crew.is_complete)
            if not self._watchdog.can_tell and self._step_seconds(now) > SILENT_STEP_SECONDS:
                wrong = f"no result from the workers for {self._step_seconds(now):.0f} s"
            if wrong:
                is_stopped = self._supervisor is not None and self._supervisor.stopped()
                self._lose(wrong, KILL if is_stopped else FAULT)

    def _step_seconds(self, now: float) -> float:
        """How long the oldest Step in flight has been on its way."""
        return now - self._sent_at if self._scheduler.in_flight else 0.0

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken(error)

    def _broken(self, error: BaseException) -> None:
        """Our own mistake; say it and answer everybody rather than hang."""
        log.error("the engine failed", exc_info=error)
        self._give_up(f"internal error: {error!r}")
