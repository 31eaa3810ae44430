"""The life of one worker process: pin, load, Ready, then a Result for every round of a Step.

It never chooses anything: the Plan says what to allocate, the gateway what to compute. Its one
socket is a DEALER whose identity is its name. `Ready` is repeated every second until the gateway
has said something, and again after a lost connection, with all slots forgotten: a worker that was
started by hand may come before the gateway and outlive it. `Ready.instance` differs between two
processes of the same name, so a gateway can tell a repetition from a restart.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import zmq
from voltapile.kernels.group import GroupError
from voltapile.shm.board import Board
from voltapile.shm.segment import SegmentError
from voltapile.topology import affinity
from voltapile.topology.endpoint import default_endpoint
from voltapile.topology.notify import Notifier
from voltapile.topology.plan import Plan
from voltapile.workers import signals, steplog
from voltapile.workers.engine import Engine, Pending, open_engine
from voltapile.workers.outbox import Outbox
from voltapile.workers.protocol import (
    Failed,
    Hold,
    Message,
    Ready,
    Stats,
    Step,
    Stop,
    decode,
    encode,
)
from voltapile.workers.rounds import Rounds
from voltapile.workers.seat import Seat
from voltapile.workers.status import Status, StatusPort
from zmq.utils.monitor import parse_monitor_message

log = logging.getLogger(__name__)

READY_SECONDS = 1.0  # between two Ready while the gateway is silent
STATS_SECONDS = 0.1  # between two Stats while loading
BEAT_SECONDS = 0.2  # between two signs of life, in a step too
ORPHAN_SECONDS = 5.0  # without a connection after which a spawned worker ends by itself
LAST_WORDS_MS = 2000  # how long Failed may take to leave
MOST_PENDING = 2  # Steps that are submitted at once, so that a device has no pause between them
WAIT_SECONDS = 2e-5  # between two looks at a device that computes
HANG_SECONDS = 60.0  # for which a device may compute one Step
MET = OSError | MemoryError | GroupError  # no mistake of ours: their text is all there is to know


class StoppedError(Exception):
    """Somebody wants this process to end, cleanly."""


class Worker:
    """One rank. is_spawned: a gateway started this process, stops it, and is its reason to live.
    is_dummy: random weights instead of the file's. status_port: of /health and /metrics, 0: a free
    one. notify: where systemd listens."""

    def __init__(
        self,
        plan: Plan,
        rank: int = 0,
        endpoint: str = "",
        record: Path | None = None,
        is_spawned: bool = False,
        is_dummy: bool = False,
        status_port: int = 0,
        notify: str = "",
    ) -> None:
        self.status_port, self.notifier = status_port, Notifier(notify)
        self.plan, self.rank, self.record, self.is_spawned = plan, rank, record, is_spawned
        self.is_dummy = is_dummy
        self.name = f"text-{rank}"
        self.endpoint = endpoint or plan.endpoint or default_endpoint(plan.id)
        self.seat = Seat(plan.id, len(plan.ranks), rank)
        self.instance = secrets.randbits(63)
        self.parent = os.getppid()
        self.is_connected = self.is_greeted = self.is_ending = False
        self.is_asked = False  # by message to end, as all ranks are
        self.reason = self.cause = ""  # why the group ends; as in Failed
        self.step_id = -1  # of the oldest Step, or the last one; while loading -1
        self.rounds, self.outbox = Rounds(), Outbox()
        self.pending: deque[Pending] = deque()  # oldest first
        self.progress_at = 0.0  # when the oldest became the oldest
        self.next_ready = self.next_stats = self.connected_at = 0.0

    def run(self) -> int:
        """Live; returns the process's exit code. Only in a main thread, since it takes signals."""
        context = zmq.Context()
        self.socket = self._make_socket(context)
        signals.watch(self._stop, self.is_spawned)
        try:
            with contextlib.ExitStack() as resources:
                self.board = resources.enter_context(self._join())
                self.status = Status(self.board, self.plan, self.rank)
                port = StatusPort(self.status, self.status_port)
                self.status_port = resources.enter_context(port).port
                log.info("/health and /metrics are at 127.0.0.1:%d", self.status_port)
                resources.enter_context(signals.beating(self._beat, BEAT_SECONDS))
                self._serve(resources)
        except StoppedError as reason:
            log.info("%s ends: %s", self.name, reason)
            if not (self.is_asked or self.is_spawned or self.seat.others):
                # The gateway does not see our process; of a group the other ranks tell it.
                self._say_last(f"{self.name} was ended: {reason}", "stopped")
        except Exception as error:
            if isinstance(error, MET) or (isinstance(error, ValueError) and self.step_id < 0):
                log.error("%s failed: %s", self.name, error)
            else:
                log.exception("%s failed", self.name)
            self._tell(error)
            return 1
        finally:
            self.is_ending = True
            self.notifier.stopping()
            self.notifier.close()
            self.socket.disable_monitor()
            self.monitor.close()
            self.socket.close()
            context.term()
        return 0

    def _tell(self, error: Exception) -> None:
        """Last words. While loading, whoever made the group fail says it, and nobody else."""
        if isinstance(error, GroupError) and self.step_id < 0:
            return
        self.is_connected = True  # or soon: a file that is not there is found out faster
        self._say_last(self.reason or describe(error), self.cause)

    def _say_last(self, reason: str, cause: str) -> None:
        self.socket.linger = LAST_WORDS_MS
        self._say(Failed(name=self.name, step=self.step_id, reason=reason, cause=cause))

    # --- start ----------------------------------------------------------------------------
    def _make_socket(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt_string(zmq.IDENTITY, self.name)
        socket.linger = 0
        self.monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        return socket

    @contextlib.contextmanager
    def _join(self) -> Iterator[Board]:
        """The Board of this Plan, with us on it.

        No word to the gateway before: our name is that of a process which may hold the seat.
        """
        try:
            board = self.seat.join()
        except SegmentError:  # which we want to tell
            self.socket.connect(self.endpoint)
            raise
        self.socket.connect(self.endpoint)
        try:
            yield board
        except StoppedError as reason:
            board.publish(self.rank, "stopped")
            if not self.is_asked:
                self.seat.leave(str(reason))
            raise
        except Exception as error:
            self.reason = self.seat.leave(describe(error))
            self.cause = self.seat.cause() if isinstance(error, GroupError) else ""
            board.publish(self.rank, "failed", describe(error))
            raise
        finally:
            board.close()

    def _load(self, resources: contextlib.ExitStack) -> Engine:
        mine = self.plan.ranks[self.rank]
        affinity.pin(mine.cpus, mine.node)
        engine = open_engine(self.plan, self.rank, self._progress, self.board, self.is_dummy)
        return resources.enter_context(engine)

    def _progress(self, stage: str, fraction: float) -> None:
        """Tell how far loading is."""
        self._beat()
        self.board.publish(self.rank, "loading", stage, fraction)
        self.notifier.status(f"loading: {stage} {fraction:.0%}")
        self._lost_gateway()
        if time.monotonic() >= self.next_stats:
            self.next_stats = time.monotonic() + STATS_SECONDS
            self._say(self._stats(stage, fraction))

    # --- loop -----------------------------------------------------------------------------
    def _serve(self, resources: contextlib.ExitStack) -> None:
        engine = self._load(resources)
        self.step_id = 0
        self._drop_mail()
        self._memory = self._stats("ready", 1.0)
        self.status.memory = engine.memory()
        self.status.routing = engine.routing
        self.status.shared_bytes = sum(each.nbytes for each in engine.shared.values())
        for purpose, (planned, allocated) in self.status.memory.items():
            self._memory.values[f"planned {purpose}"] = planned
            self._memory.values[f"allocated {purpose}"] = allocated
        self.connected_at = time.monotonic()  # a patience that begins now
        self.board.publish(self.rank, "ready", "ready", 1.0)
        self.notifier.ready("ready")
        # A supervisor's log goes on with its forerunner's.
        log = self.record.open("ab" if self.is_spawned else "wb") if self.record else None
        self.log = log and resources.enter_context(log)
        self._note(self._ready())
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)
        while True:
            is_busy = self.pending or self.rounds
            events = dict(poller.poll(0 if is_busy else int(BEAT_SECONDS * 1000)))
            self._beat()
            if self._lost_gateway() and self.is_greeted:
                self._start_anew(engine)
            elif self.socket in events:  # before a Result says what follows
                self._handle(engine, self.socket.recv_multipart())
            elif self.pending and self.pending[0].is_done:
                self._finish(engine)
            elif self.rounds and len(self.pending) < MOST_PENDING:
                self._submit(engine)
            elif self.pending:
                self._wait()
            elif not self.is_greeted and time.monotonic() >= self.next_ready:
                self._offer()
            elif not events:
                self.seat.check_mates()

    def _drop_mail(self) -> None:
        """Whatever has come before our first Ready was for the process before us."""
        while self.socket.poll(0):
            message = decode(self.socket.recv_multipart())
            if isinstance(message, Stop) and self.is_spawned:
                self._obey(message)

    def _handle(self, engine: Engine, frames: list[bytes]) -> None:
        message = decode(frames)
        self.is_greeted = True
        match message:
            case Step():
                self.rounds.add(message)
            case Hold():
                self.rounds.hold(message.step)
            case Stop():  # other ranks may be at what has come before it
                self.rounds.cut()
                while self.rounds or self.pending:
                    if self.rounds and len(self.pending) < MOST_PENDING:
                        self._submit(engine)
                    else:
                        self._finish(engine)
                self._obey(message)
            case _:
                raise ValueError(f"a worker does not understand {type(message).__name__}")

    def _submit(self, engine: Engine) -> None:
        is_first = not self.rounds.is_amid
        step = self.rounds.next()
        if is_first:
            self._note(step)  # before it runs, so that the log holds the Step that kills
        if not self.pending:
            self._begin(step)
        self.step_id = step.id
        self.pending.append(engine.submit(step))
        self.step_id = self.pending[0].step.id

    def _finish(self, engine: Engine) -> None:
        """Tell the Result of the oldest round."""
        pending = self.pending.popleft()
        result = engine.collect(pending)
        self.rounds.settle(result)
        self.status.step_done(result.seconds)
        if self.pending:
            self._begin(self.pending[0].step)
        else:
            self.board.begin_step(self.rank, -1)
        self._note(result)
        if self.rank != self.plan.answer_rank:
            return
        for due in self.outbox.put(result, pending.step):
            self._say(due)

    def _begin(self, step: Step) -> None:
        """A Step is the oldest now."""
        self.step_id, self.progress_at = step.id, time.monotonic()
        self.board.begin_step(self.rank, step.id)

    def _wait(self) -> None:
        """A little, for a device that computes. Our loop beats meanwhile, so it must notice by
        itself when the device hangs."""
        seconds = time.monotonic() - self.progress_at
        if seconds > HANG_SECONDS:
            raise RuntimeError(f"step {self.step_id} has not ended in {seconds:.0f} s")
        time.sleep(WAIT_SECONDS)

    def _obey(self, stop: Stop) -> None:
        self.is_asked = True
        raise StoppedError(stop.reason or "the gateway asked")

    def _lost_gateway(self) -> bool:
        """Follow the connection; True if one has ended."""
        was_lost = False
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())["event"]
            self.is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.connected_at, self.next_ready = time.monotonic(), 0.0
            was_lost |= not self.is_connected
        return was_lost

    def _start_anew(self, engine: Engine) -> None:
        """The gateway is gone: the next one finds empty slots.

        No Ready has gone out since it greeted us, so whatever is still to be read is its own: Steps
        that nobody waits for but the other ranks, or its last word. A Step that did not reach them
        all ends the group at its deadline.
        """
        log.info("%s has lost its gateway", self.name)
        self.rounds.cut()
        while self.pending or self.rounds or self.socket.poll(0):
            if self.pending:
                engine.collect(self.pending.popleft())
            elif self.rounds:
                step = self.rounds.next()
                if len(self.plan.ranks) > 1:
                    self.pending.append(engine.submit(step))
            elif isinstance(message := decode(self.socket.recv_multipart()), Stop):
                self._obey(message)
            elif isinstance(message, Step):
                self.rounds.add(message)
        self.rounds, self.outbox = Rounds(), Outbox()
        self.board.begin_step(self.rank, -1)
        engine.forget()
        self._note(self._ready())
        self.is_greeted = False

    def _offer(self) -> None:
        """Tell whatever gateway is there that this worker is ready."""
        self.next_ready = time.monotonic() + READY_SECONDS
        self._say(self._memory)  # with "ready": a small one loads before the connection stands
        self._say(self._ready())
        silence = time.monotonic() - self.connected_at
        if self.is_spawned and not self.is_connected and silence > ORPHAN_SECONDS:
            # A gateway that died before we watched its process leaves no other trace.
            raise StoppedError("no gateway is there")

    def _stats(self, stage: str, fraction: float) -> Stats:
        told: dict[str, float | str] = {"stage": stage, "fraction": fraction}
        return Stats(name=self.name, values={**told, "status port": self.status_port})

    def _ready(self) -> Ready:
        plan, pages = self.plan, [group.pages for group in self.plan.caches]
        name, instance = self.name, self.instance
        return Ready(name=name, plan=plan.id, pages=pages, slots=plan.slots, instance=instance)

    def _note(self, message: Message) -> None:
        """Into the Step log, if one is kept."""
        if self.log:
            steplog.write(self.log, encode(message))

    def _say(self, message: Message) -> None:
        """Send, if a gateway is there: what is queued for the next one would come late."""
        if self.is_connected:
            with contextlib.suppress(zmq.Again):  # a gateway that has not read a thousand messages
                self.socket.send_multipart(encode(message), zmq.NOBLOCK)

    # --- signs of life and of death -------------------------------------------------------
    def _beat(self) -> None:
        self.board.beat(self.rank)
        self.notifier.beat()
        if self.board.aborted is not None:
            raise GroupError(f"the group was ended: {self.board.aborted}")
        if self.is_spawned and os.getppid() != self.parent:
            raise StoppedError("the gateway's process is gone")

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self.is_ending:
            self.is_ending = True
            raise StoppedError(f"got {signal.Signals(number).name}")


def describe(error: BaseException) -> str:
    """One line for people."""
    text = str(error).strip() or "no message"
    return text if isinstance(error, ValueError | MET) else f"{type(error).__name__}: {text}"
