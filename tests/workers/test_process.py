"""The worker process, spawned as a gateway would and spoken to over a real ZeroMQ socket."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from voltapile.shm.board import Board
from voltapile.topology.plan import Plan, to_json
from voltapile.workers import process as worker_process
from voltapile.workers import steplog
from voltapile.workers.protocol import (
    Failed,
    Hold,
    Message,
    Ready,
    Result,
    Row,
    Sampling,
    Stats,
    Step,
    Stop,
    decode,
    encode,
)
from voltapile.workers.routing import Routing

Make = Callable[..., Any]
DEADLINE = 20.0
PROMPT = np.arange(30, 70, dtype=np.int32)


class Gateway:
    """A ROUTER socket and the worker behind it."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.context = zmq.Context()
        self.socket = self.bind()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.worker = b""

    def bind(self) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.router_handover = True
        socket.bind(self.plan.endpoint)
        return socket

    def spawn(self, *extra: str, command: tuple[str, ...] = ("voltapile.workers",)) -> Any:
        path = self.folder / "plan.json"
        path.write_bytes(to_json(self.plan))
        argv = [sys.executable, "-m", *command, "--plan", str(path), *extra]
        self.processes.append(subprocess.Popen(argv))
        return self.processes[-1]

    def receive(self, kind: type, deadline: float = DEADLINE) -> Any:
        """The next message of that kind; Stats before it are dropped."""
        end = time.monotonic() + deadline
        while self.socket.poll(max(0, int((end - time.monotonic()) * 1000))):
            self.worker, *frames = self.socket.recv_multipart()
            message = decode(frames)
            if isinstance(message, kind):
                return message
            assert isinstance(message, Stats | Ready), message
        pytest.fail(f"no {kind.__name__} within {deadline} s")

    def send(self, message: Message) -> None:
        self.socket.send_multipart([self.worker, *encode(message)])

    def generate(self, count: int) -> list[int]:
        """Greedy tokens, with two Steps in flight."""
        pages = [[1, 2, 3, 4] for _ in self.plan.caches]
        rows = [Row(slot=0, tokens=PROMPT, pages=pages, sampling=Sampling())]
        rows += [Row(slot=0) for _ in range(count - 1)]
        for i, row in enumerate(rows):
            self.send(Step(id=i + 1, rows=[row]))
        tokens: list[int] = []
        for i in range(count):
            result = self.receive(Result)
            assert result.id == i + 1
            tokens += result.rows[0].tokens
        self.send(Step(id=count + 1, release=[0]))
        self.receive(Result)
        return tokens

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait(DEADLINE)
        self.socket.close()
        self.context.term()


@pytest.fixture
def gateway(mini: Path, plan_for: Make, tmp_path: Path) -> Iterator[Gateway]:
    endpoint = f"ipc://{tmp_path}/s"
    found = Gateway(
        plan_for(mini / "llama/model-f16.gguf", "cpu", endpoint=endpoint, context=256), tmp_path
    )
    yield found
    found.close()


def test_ready_steps_stop(gateway: Gateway, engine_for: Make, drive: Make, mini: Path) -> None:
    process = gateway.spawn()
    ready = gateway.receive(Ready)
    assert (ready.name, ready.plan) == ("text-0", gateway.plan.id)
    assert ready.pages == [group.pages for group in gateway.plan.caches]
    assert ready.slots == gateway.plan.slots
    assert gateway.worker == b"text-0"
    engine = engine_for(mini / "llama/model-f16.gguf", "cpu")
    assert gateway.generate(20) == drive(engine).generate(PROMPT.tolist(), 20)
    gateway.send(Stop(reason="enough"))
    assert process.wait(DEADLINE) == 0


def test_rounds(gateway: Gateway, tmp_path: Path) -> None:
    """The tokens of as many Steps, and none behind the last of a row."""
    gateway.spawn("--record", str(tmp_path / "steps"))
    gateway.receive(Ready)
    expected = gateway.generate(6)
    pages = [[1, 2, 3, 4] for _ in gateway.plan.caches]
    sampling = Sampling(max_position=len(PROMPT) + 6)
    row = Row(slot=0, tokens=PROMPT, pages=pages, sampling=sampling)
    gateway.send(Step(id=20, rounds=9, rows=[row]))
    results = [gateway.receive(Result) for _ in range(6)]
    assert [token for result in results for token in result.rows[0].tokens] == expected
    assert [result.left for result in results] == [8, 7, 6, 5, 4, 0]
    gateway.send(Step(id=21, release=[0]))
    assert gateway.receive(Result).id == 21
    with (tmp_path / "steps").open("rb") as file:
        kinds = [type(decode(frames)) for frames in steplog.read(file)]
    assert kinds[-9:] == [Step] + [Result] * 6 + [Step, Result]


def test_loading_is_told(gateway: Gateway) -> None:
    gateway.spawn()
    stats = gateway.receive(Stats)
    assert stats.name == "text-0"
    assert isinstance(stats.values["stage"], str)
    assert 0.0 <= float(stats.values["fraction"]) <= 1.0
    gateway.receive(Ready)


def test_ready_is_repeated_until_answered(gateway: Gateway) -> None:
    gateway.spawn()
    first = gateway.receive(Ready)
    assert gateway.receive(Ready).instance == first.instance
    gateway.send(Step(id=1))
    gateway.receive(Result)
    assert not gateway.socket.poll(1500)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals(gateway: Gateway, number: signal.Signals) -> None:
    """SIGTERM ends it cleanly; Ctrl-C is for the gateway, which then ends its workers."""
    process = gateway.spawn()
    gateway.receive(Ready)
    process.send_signal(number)
    if number == signal.SIGINT:
        assert gateway.generate(2)
        process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_by_hand_takes_leave(gateway: Gateway, number: signal.Signals) -> None:
    """Nobody sees its process end."""
    process = gateway.spawn(command=("voltapile.gateway.cli.main", "worker"))
    gateway.receive(Ready)
    process.send_signal(number)
    failed = gateway.receive(Failed)
    assert failed.reason == f"text-0 was ended: got {number.name}"
    assert failed.cause == "stopped"
    assert process.wait(DEADLINE) == 0


def test_killed_and_started_again(gateway: Gateway) -> None:
    process = gateway.spawn()
    first = gateway.receive(Ready)
    expected = gateway.generate(8)
    process.kill()
    process.wait(DEADLINE)
    gateway.spawn()
    second = gateway.receive(Ready)
    while second.instance == first.instance:
        second = gateway.receive(Ready)
    assert gateway.generate(8) == expected


def test_a_failure_is_told(gateway: Gateway) -> None:
    process = gateway.spawn()
    gateway.receive(Ready)
    gateway.send(Step(id=7, rows=[Row(slot=0, tokens=np.zeros(10**5, np.int32))]))
    failed = gateway.receive(Failed)
    assert (failed.name, failed.step) == ("text-0", 7)
    assert "planned" in failed.reason
    assert process.wait(DEADLINE) == 1


def test_a_missing_model_is_told(gateway: Gateway, tmp_path: Path) -> None:
    from voltapile.topology import plan as plans

    lost = [str(tmp_path / "nothing.gguf")]
    changed = plans.msgspec.structs.replace(gateway.plan, model=lost, id="")
    gateway.plan = plans.msgspec.structs.replace(changed, id=plans.plan_id(changed))
    process = gateway.spawn()
    failed = gateway.receive(Failed)
    assert failed.step == -1
    assert "nothing.gguf" in failed.reason
    assert process.wait(DEADLINE) == 1


def test_the_log_replays(gateway: Gateway, tmp_path: Path, engine_for: Make, mini: Path) -> None:
    """A worker is a fold over its Step log."""
    path = tmp_path / "steps"
    gateway.spawn("--record", str(path))
    gateway.receive(Ready)
    expected = gateway.generate(10)
    engine = engine_for(mini / "llama/model-f16.gguf", "cpu", context=256)
    tokens: list[int] = []
    with path.open("rb") as file:
        ready, *messages = map(decode, steplog.read(file))
    assert isinstance(ready, Ready)
    assert len(messages) % 2 == 0
    for step, recorded in zip(messages[::2], messages[1::2], strict=True):
        assert isinstance(step, Step)
        assert isinstance(recorded, Result)
        result = engine.run(step)
        assert (result.id, result.rows) == (recorded.id, recorded.rows)
        for answer in result.rows:
            tokens += answer.tokens
    assert tokens == expected


def test_the_log_goes_on_after_a_restart(gateway: Gateway, tmp_path: Path) -> None:
    path = tmp_path / "steps"
    process = gateway.spawn("--record", str(path))
    first = gateway.receive(Ready)
    gateway.generate(3)
    process.kill()
    process.wait(DEADLINE)
    gateway.spawn("--record", str(path))
    while gateway.receive(Ready).instance == first.instance:
        pass
    gateway.generate(3)
    with path.open("rb") as file:
        kinds = [type(decode(frames)) for frames in steplog.read(file)]
    half = len(kinds) // 2
    assert kinds[:half] == kinds[half:]
    assert kinds[:3] == [Ready, Step, Result]
    assert kinds.count(Ready) == 2


def test_the_board_tells(gateway: Gateway) -> None:
    board = Board.create(gateway.plan.id, 1)
    try:
        process = gateway.spawn()
        gateway.receive(Ready)
        health = board.health(0)
        assert (health.pid, health.state, health.step) == (process.pid, "ready", -1)
        time.sleep(0.5)
        assert board.is_alive(0, max_age=1.0)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.2)
        assert not board.is_alive(0, max_age=1.0)
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(DEADLINE)
        assert board.health(0).state == "stopped"
    finally:
        board.close()


def test_ends_with_its_parent(gateway: Gateway, tmp_path: Path) -> None:
    """A gateway that is killed leaves no worker behind."""
    path = tmp_path / "plan.json"
    path.write_bytes(to_json(gateway.plan))
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-m', 'voltapile.workers', '--plan', sys.argv[1]])\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        gateway.receive(Ready)
    finally:
        parent.kill()
        parent.wait(DEADLINE)
        parent.stdout.close()
    end = time.monotonic() + DEADLINE
    while Path(f"/proc/{pid}").exists() and "(zombie)" not in state_of(pid):
        assert time.monotonic() < end, "the worker outlives its gateway"
        time.sleep(0.05)


def test_the_last_word_counts(gateway: Gateway) -> None:
    """A gateway that says Stop and closes at once is obeyed, also by a worker that computes."""
    process = gateway.spawn(command=("voltapile.gateway.cli.main", "worker"))
    gateway.receive(Ready)
    gateway.generate(2)
    tokens = np.arange(30, 230, dtype=np.int32)
    row = Row(slot=0, tokens=tokens, pages=[[1, 2, 3, 4]], sampling=Sampling())
    gateway.socket.linger = 1000
    for i in range(20):
        gateway.send(Step(id=10 + i, rows=[row], release=[0]))
    gateway.send(Stop(reason="the gateway ends"))
    gateway.socket.close()
    gateway.socket = gateway.context.socket(zmq.ROUTER)
    assert process.wait(DEADLINE) == 0


class Mail:
    """A socket with what has come."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)

    def poll(self, milliseconds: int) -> bool:
        return bool(self.messages)

    def recv_multipart(self) -> Any:
        return encode(self.messages.pop(0))


def test_mail_for_the_process_before_us(gateway: Gateway) -> None:
    """By hand, both have the same name. One that a gateway has started may be told to end."""
    mail = Mail(Step(id=3), Stop(reason="the others"))
    worker = worker_process.Worker(gateway.plan)
    worker.socket = mail  # type: ignore[assignment]
    worker._drop_mail()
    assert not mail.messages
    worker = worker_process.Worker(gateway.plan, is_spawned=True)
    worker.socket = Mail(Step(id=3), Stop(reason="bye"))  # type: ignore[assignment]
    with pytest.raises(worker_process.StoppedError, match="bye"):
        worker._drop_mail()


@pytest.mark.slow
def test_ends_without_any_gateway(gateway: Gateway) -> None:
    """It was killed before the worker could watch it."""
    gateway.socket.close()
    process = gateway.spawn()
    assert process.wait(DEADLINE) == 0


def state_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/status").read_text()
    return "(zombie)"


def test_by_hand_outlives_a_gateway(gateway: Gateway) -> None:
    """Started before any gateway, it finds the first, and the next with all slots empty."""
    gateway.socket.close()
    process = gateway.spawn(command=("voltapile.gateway.cli.main", "worker"))
    time.sleep(1.0)
    gateway.socket = gateway.bind()
    gateway.receive(Ready)
    expected = gateway.generate(6)
    pages = [[5, 6] for _ in gateway.plan.caches]
    gateway.send(Step(id=1, rows=[Row(slot=0, tokens=PROMPT, pages=pages, sampling=Sampling())]))
    gateway.receive(Result)
    gateway.socket.close()
    gateway.socket = gateway.bind()
    gateway.receive(Ready)
    assert gateway.generate(6) == expected
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(DEADLINE) == 0


class LateEngine:
    """A device that has computed the Steps up to `computed`."""

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.shared: dict[str, Any] = {}
        self.routing = Routing({})
        self.computed = 0

    def submit(self, step: Step) -> Any:
        self.submitted.append(step.id)
        late = self

        class Pending:
            def __init__(self) -> None:
                self.step = step

            @property
            def is_done(self) -> bool:
                return late.computed >= step.id

        return Pending()

    def collect(self, pending: Any) -> Result:
        wait_until(lambda: pending.is_done)
        return Result(id=pending.step.id, rows=[], seconds=0.0)

    def memory(self) -> dict[str, tuple[int, int]]:
        return {"kv": (100, 99)}

    def forget(self) -> None:
        pass


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateEngine:
    engine = LateEngine()
    opened = contextlib.nullcontext(engine)
    monkeypatch.setattr(worker_process, "open_engine", lambda *_: opened)
    monkeypatch.setattr(worker_process.affinity, "pin", lambda *_: None)
    return engine


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_two_steps_are_under_way(gateway: Gateway, late: LateEngine) -> None:
    def drive() -> None:
        gateway.receive(Ready)
        for i in (1, 2, 3):
            gateway.send(Step(id=i))
        wait_until(lambda: late.submitted == [1, 2])
        time.sleep(0.1)
        assert late.submitted == [1, 2]
        late.computed = 1
        assert gateway.receive(Result).id == 1
        wait_until(lambda: late.submitted == [1, 2, 3])
        gateway.send(Stop())
        late.computed = 3
        assert [gateway.receive(Result).id for _ in range(2)] == [2, 3]

    with ThreadPoolExecutor(1) as pool:
        driving = pool.submit(drive)
        assert worker_process.Worker(gateway.plan).run() == 0
        driving.result()


def test_a_hold_ends_the_rounds(gateway: Gateway, late: LateEngine) -> None:
    def drive() -> None:
        gateway.receive(Ready)
        gateway.send(Step(id=1, rounds=9))
        gateway.send(Step(id=2, rounds=9))
        wait_until(lambda: late.submitted == [1, 1])
        gateway.send(Hold(step=1))
        gateway.send(Hold(step=2))
        gateway.send(Hold(step=0))
        time.sleep(0.1)
        late.computed = 2
        results = [gateway.receive(Result) for _ in range(3)]
        assert [(result.id, result.left) for result in results] == [(1, 1), (1, 0), (2, 0)]
        assert late.submitted == [1, 1, 2]
        gateway.send(Stop())

    with ThreadPoolExecutor(1) as pool:
        driving = pool.submit(drive)
        assert worker_process.Worker(gateway.plan).run() == 0
        driving.result()


def test_a_device_that_hangs(
    gateway: Gateway, late: LateEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "HANG_SECONDS", 0.2)

    def drive() -> Failed:
        gateway.receive(Ready)
        gateway.send(Step(id=7))
        found = gateway.receive(Failed)
        assert isinstance(found, Failed)
        return found

    with ThreadPoolExecutor(1) as pool:
        driving = pool.submit(drive)
        assert worker_process.Worker(gateway.plan).run() == 1
        failed = driving.result()
    assert failed.step == 7
    assert "has not ended" in failed.reason
