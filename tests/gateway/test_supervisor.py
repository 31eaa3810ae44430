"""The supervisor with trivial children."""

import asyncio
import errno
import io
import os
import signal
import socket
import stat
import sys
import time
from pathlib import Path

import msgspec
import pytest
from voltapile.gateway import supervisor as supervisor_module
from voltapile.gateway.supervisor import (
    Pulse,
    Restarts,
    Supervisor,
    is_taken,
    plan_file,
    worker_command,
)
from voltapile.shm.board import Board
from voltapile.shm.segment import SegmentError
from voltapile.topology.plan import Plan, from_json, plan_id

SLEEP = "import time; time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('x'); {SLEEP}"


def child(code: str) -> list[str]:
    return [sys.executable, "-S", "-E", "-c", code]


def make_plan(endpoint: str) -> Plan:
    plan = Plan(
        model=["m"], alias="m", architecture="llama", backend="cpu", endpoint=endpoint, context=8,
        slots=1, batch_tokens=64, buckets=[1], steps_in_flight=2, answer_rank=0, ranks=[],
        caches=[], tensors={},
    )  # fmt: skip
    return msgspec.structs.replace(plan, id=plan_id(plan))


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit(3)", "the worker ended with exit code 3"),
        ("raise SystemExit(0)", "the worker ended with exit code 0"),  # it was told to
        (
            "import sys; sys.stderr.write('bad luck\\nnow INFO loaded\\n'); sys.exit(4)",
            "the worker ended with exit code 4: bad luck",
        ),
        ("raise SystemExit('no\\nsuch file')", "the worker ended with exit code 1: such file"),
        ("import os; os.kill(os.getpid(), 9)", "the worker was ended by SIGKILL"),
        ("import os; os.kill(os.getpid(), 40)", "the worker was ended by signal 40"),
        (
            "import sys; sys.stderr.write('y' * 300_000 + '\\nend'); sys.exit(2)",
            "the worker ended with exit code 2: end",
        ),
    ],
)
async def test_why_a_child_ended(code: str, reason: str) -> None:
    supervisor = Supervisor([child(code)])
    await supervisor.start()
    assert await supervisor.wait() == reason
    assert supervisor.was_killed == ("SIGKILL" in reason or "code 0" in reason)
    assert supervisor.pids == []


async def test_a_kill_for_want_of_memory_is_no_persons(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([3, 4])
    monkeypatch.setattr(supervisor_module, "oom_kills", lambda: next(counts))
    supervisor = Supervisor([child("import os; os.kill(os.getpid(), 9)")])
    await supervisor.start()
    reason = await supervisor.wait()
    assert reason == "the worker was ended by SIGKILL (the kernel had run out of memory)"
    assert not supervisor.was_killed


def test_kills_for_want_of_memory_are_counted() -> None:
    assert supervisor_module.oom_kills() >= 0
    assert supervisor_module._counted(Path("/proc/none")) == 0


async def test_when_one_ends_all_do_and_can_start_again() -> None:
    supervisor = Supervisor([child(SLEEP), child("raise SystemExit(4)")])
    for _ in range(2):
        await supervisor.start()
        pids = supervisor.pids
        assert await supervisor.wait() == "the worker of rank 1 ended with exit code 4"
        assert not any(map(exists, pids))


async def test_who_was_killed_comes_before_who_followed() -> None:
    supervisor = Supervisor(
        [child("raise SystemExit(1)"), child("import os; os.kill(os.getpid(), 9)")]
    )
    await supervisor.start()
    for process in supervisor._processes:
        await process.wait()
    assert await supervisor.wait() == "the worker of rank 1 was ended by SIGKILL"


async def test_who_was_stopped_is_named() -> None:
    supervisor = Supervisor([child(SLEEP), child(SLEEP)])
    await supervisor.start()
    assert supervisor.stopped() == ""
    os.kill(supervisor.pids[1], signal.SIGSTOP)
    async with asyncio.timeout(2):
        while not supervisor.stopped():
            await asyncio.sleep(0.01)
    assert supervisor.stopped() == "the worker of rank 1"
    supervisor.kill()
    await supervisor.wait()


async def test_kill_reaches_a_waiting_reader() -> None:
    supervisor = Supervisor([child(SLEEP)])
    await supervisor.start()
    asyncio.get_running_loop().call_later(0.1, supervisor.kill)
    assert await supervisor.wait() == "the worker was ended by SIGKILL"
    supervisor.kill()  # nobody is there any more


async def test_stop_asks_then_insists() -> None:
    supervisor = Supervisor([child(SLEEP)])
    await supervisor.start()
    [pid] = supervisor.pids
    began = time.monotonic()
    await supervisor.stop(was_asked=False)
    assert time.monotonic() - began < 0.7
    assert not exists(pid)


async def test_stop_ends_what_does_not_listen() -> None:
    supervisor = Supervisor([child(DEAF)])
    await supervisor.start()
    [pid] = supervisor.pids
    await asyncio.sleep(0.3)
    began = time.monotonic()
    await supervisor.stop()
    assert time.monotonic() - began < 2.5
    assert not exists(pid)


async def test_stop_lets_a_child_end_by_itself() -> None:
    supervisor = Supervisor([child("import time; time.sleep(0.3)")])
    await supervisor.start()
    await supervisor.stop()
    assert supervisor.pids == []
    await supervisor.stop()


async def test_a_grandchild_that_holds_the_pipe_does_not_hold_us() -> None:
    code = "import os, time\nif os.fork(): os._exit(5)\ntime.sleep(2)"
    supervisor = Supervisor([child(code)])
    await supervisor.start()
    async with asyncio.timeout(2):
        assert await supervisor.wait() == "the worker ended with exit code 5"


async def test_a_program_that_is_not_there() -> None:
    supervisor = Supervisor([child(SLEEP), ["/nowhere/at/all"]])
    for _ in range(2):
        with pytest.raises(OSError, match="No such file"):
            await supervisor.start()
        assert supervisor.pids == []


async def test_words_are_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    supervisor = Supervisor([child("import sys; sys.stderr.write('hello\\n\\n')")])
    await supervisor.start()
    await supervisor.wait()
    assert capsys.readouterr().err == "hello\n"


def test_a_worker_that_was_ready_is_always_started_again() -> None:
    restarts = Restarts(limit=3, window=60, pause=0.25, longest=4.0)
    pauses = [restarts.next_pause(now, was_ready=True) for now in range(50)]
    assert pauses[:6] == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0]
    assert set(pauses[6:]) == {4.0}
    assert restarts.next_pause(1000, was_ready=True) == 0.25


def test_a_worker_that_is_never_ready_is_started_a_few_times() -> None:
    restarts = Restarts(limit=3)
    for now in (0, 1000):  # however far apart: it is the same failure
        states = (False, False, False, True, False, False)
        assert None not in [restarts.next_pause(now, was_ready) for was_ready in states]
        restarts.next_pause(now, was_ready=True)
    pauses = [restarts.next_pause(2000 + 100 * n, was_ready=False) for n in range(5)]
    assert pauses == [0.25, 0.25, 0.25, None, None]


def test_the_plan_file_is_private_and_goes_away(tmp_path: Path) -> None:
    plan = make_plan(f"ipc://{tmp_path}/socket.sock")
    (tmp_path / "socket.sock").touch()
    (tmp_path / "socket.json").write_text("left by another")
    with plan_file(plan) as path:
        assert path.parent == tmp_path
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert from_json(path.read_bytes()) == plan
        assert worker_command(path, 1)[-4:] == ["--plan", str(path), "--rank", "1"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("taken", [None, 5])
def test_a_full_disk_is_told_with_the_path(tmp_path: Path, taken: int | None) -> None:
    class Full(io.RawIOBase):
        def write(self, data: object) -> int:
            if taken is None:
                raise OSError(errno.ENOSPC, "No space left on device")
            return taken

    with pytest.raises(OSError, match=r"No space left on device: .*plan\.json"):
        supervisor_module._write(Full(), b"a long plan", tmp_path / "plan.json")


def test_what_killed_servers_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("voltapile.gateway.supervisor.runtime_directory", lambda: tmp_path)
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as live:
        dead.bind(str(tmp_path / "dead.sock"))
        live.bind(str(tmp_path / "live.sock"))
        live.listen()
        for name in ("dead.json", "live.json", "starting.json"):
            (tmp_path / name).touch()
        (tmp_path / "never-listened.json").write_text("{}")
        first, second = make_plan("tcp://127.0.0.1:1"), make_plan("tcp://127.0.0.1:2")
        with plan_file(first) as ours, plan_file(second):
            assert ours.exists(), "a living server's, although no socket is beside it"
        left = sorted(path.name for path in tmp_path.iterdir())
        assert left == ["live.json", "live.sock", "starting.json"]
        assert is_taken(f"ipc://{tmp_path}/live.sock")
        assert not is_taken(f"ipc://{tmp_path}/dead.sock")
        assert not is_taken("tcp://127.0.0.1:1")


def test_pulse_says_why_there_can_be_no_board(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Board:
        raise SegmentError("No space left on device")

    monkeypatch.setattr(Board, "create", refuse)
    with pytest.raises(SegmentError, match="No space left"):
        Pulse(make_plan("tcp://127.0.0.1:1"))


def test_pulse_is_the_quietest_ranks(tmp_path: Path) -> None:
    plan = make_plan(f"ipc://{tmp_path}/socket")
    plan = msgspec.structs.replace(plan, ranks=[None, None])  # type: ignore[list-item]
    with Pulse(plan) as pulse:
        board = Board.open(plan.id, 2)
        assert pulse.age() is None
        board.join(0)
        assert pulse.age() is None
        board.join(1)
        time.sleep(0.1)
        board.beat(0)
        age = pulse.age()
        assert age is not None
        assert 0.1 <= age < 1
        board.wait_for(1, 0)
        assert pulse.quietest() == "the worker of rank 1, which waits for rank 0"
        board.publish(0, "ready")
        pulse.abort("enough")
        assert board.aborted is None, "rank 1 loads: these are the next ones"
        board.publish(1, "ready")
        pulse.abort("enough")
        assert board.aborted == "enough"
        pulse.begin()
        assert board.aborted is None
        assert board.health(1).pid == 0
        board.close()
    assert not board.segment.path.exists()


def test_pulse_follows_a_board_that_someone_else_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("voltapile.gateway.supervisor.RENEW_SECONDS", 0.05)
    plan = make_plan(f"ipc://{tmp_path}/socket")
    plan = msgspec.structs.replace(plan, ranks=[None])  # type: ignore[list-item]
    first = Board.create(plan.id, 1)
    first.join(0)
    with Pulse(plan) as pulse:
        first.close()
        time.sleep(0.1)
        old = pulse.age()
        assert old is not None
        assert old >= 0.1
        second = Board.create(plan.id, 1)
        second.join(0)
        new = pulse.age()
        assert new is not None
        assert new < 0.1
        second.close()
