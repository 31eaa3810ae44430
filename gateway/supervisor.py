"""Supervisor: starts worker processes, sees them end, and ends them.

A process is born, dies with a reason (its last words on standard error), and may be born again;
`Restarts` says when. It knows neither messages nor models: the engine
asks a worker to stop, the supervisor only sends signals.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import signal
import socket as socketlib
import sys
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import RawIOBase
from math import isfinite
from pathlib import Path
from typing import Self

from voltapile.shm.board import Board
from voltapile.shm.segment import SegmentError
from voltapile.topology.endpoint import default_endpoint, prepare, runtime_directory
from voltapile.topology.plan import Plan, to_json

LAST_WORDS = 20  # lines of standard error kept for the reason
NEWS = " INFO "  # in a line of the worker's log that explains nothing
RENEW_SECONDS = 1.0  # age of a heartbeat that may be on an old Board
LOOK_SECONDS = 5.0  # between two looks at whether memory ran out
ASK_SECONDS, TERM_SECONDS = 1.0, 0.8  # together with SIGKILL well under three seconds


def worker_command(plan: Path, rank: int) -> list[str]:
    command = [sys.executable, "-m", "voltapile.workers"]
    return [*command, "--plan", str(plan), "--rank", str(rank)]


@contextmanager
def plan_file(plan: Plan) -> Iterator[Path]:
    """The Plan as a file that only this user reads; gone at the end, and the ipc socket too.

    It lies beside the socket (endpoint `tcp://`: where default sockets would lie).
    """
    prepare(plan.endpoint)
    prepare(default_endpoint(plan.id))
    folder = runtime_directory()
    _sweep(folder)
    socket = _socket_path(plan.endpoint) or folder / f"{plan.id}.sock"
    path = socket.with_suffix(".json")
    path.unlink(missing_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # while we live, which is what _sweep asks
            _write(file, to_json(plan), path)
            yield path
    finally:
        path.unlink(missing_ok=True)
        socket.unlink(missing_ok=True)


def _write(file: RawIOBase, data: bytes, path: Path) -> None:
    """Raises OSError, also where a disk takes a part of it only."""
    try:
        done = file.write(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    if done != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def is_taken(endpoint: str) -> bool:
    """Somebody listens there. ZeroMQ would take an ipc address away from them silently."""
    path = _socket_path(endpoint)
    return path is not None and _listens(path)


def _socket_path(endpoint: str) -> Path | None:
    is_ipc = endpoint.startswith("ipc://")
    return Path(endpoint.removeprefix("ipc://")) if is_ipc else None


def _listens(path: Path) -> bool:
    with socketlib.socket(socketlib.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _sweep(folder: Path) -> None:
    """Remove what servers that were killed have left."""
    for path in folder.glob("*.sock"):
        if not _listens(path):
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
    for path in folder.glob("*.json"):  # of those killed before they listened
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_written = file.read(1) != b""  # an empty one's owner is about to lock it
            if is_written and not _listens(path.with_suffix(".sock")):
                path.unlink(missing_ok=True)


class Pulse:
    """How long ago the quietest rank of a plan gave a sign of life on the Board.

    Made before the workers are started. A worker that someone else started before us has made its
    own Board; after its end the next one makes another, so an old one is looked up again.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan_id, self._ranks = plan.id, len(plan.ranks)
        try:
            self._board = Board.create(self._plan_id, self._ranks)
            self._is_ours = True
        except SegmentError as error:
            try:
                self._board = Board.open(self._plan_id, self._ranks)
            except SegmentError:
                raise error from None  # there is none: what says why is that none can be made
            self._is_ours = False

    def age(self) -> float | None:
        """Seconds; None: a rank has not begun."""
        age = self._age()
        if age > RENEW_SECONDS and not self._is_ours:
            with suppress(SegmentError):
                board = Board.open(self._plan_id, self._ranks)
                self._board.close()
                self._board = board
                age = self._age()
        return age if isfinite(age) else None

    def quietest(self) -> str:
        """Which rank that is, and whom it says it waits for."""
        found = [self._board.health(rank) for rank in range(self._ranks)]
        rank = max(range(self._ranks), key=lambda rank: found[rank].age)
        other = found[rank].waits_for
        waits = f", which waits for rank {other}" if 0 <= other < self._ranks else ""
        return worker_name(rank, self._ranks) + waits

    def begin(self) -> None:
        """Forget the ranks before those that are started now."""
        if self._is_ours:
            self._board.clear()

    def abort(self, reason: str) -> None:
        """End ranks that wait for each other; not those that load, which are the next ones."""
        states = {self._board.health(rank).state for rank in range(self._ranks)}
        if states == {"ready"}:
            self._board.abort(reason)

    def close(self) -> None:
        self._board.close()

    def _age(self) -> float:
        return max(map(self._board.age, range(self._ranks)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Restarts:
    """Whether and when to start again. Each restart within `window` seconds waits longer.

    A worker that has been ready is always started again: it was something that it met, and the
    next one meets it alone or not at all. One that has not is started `limit` times in a row.
    """

    def __init__(
        self, limit: int = 3, window: float = 60.0, pause: float = 0.25, longest: float = 4.0
    ) -> None:
        self.limit, self.window, self.pause, self.longest = limit, window, pause, longest
        self._times: deque[float] = deque()
        self._failures = 0

    def next_pause(self, now: float, was_ready: bool) -> float | None:
        """Seconds to wait before starting again at time `now`; None: do not."""
        self._failures = 0 if was_ready else self._failures + 1
        if self._failures > self.limit:
            return None
        while self._times and now - self._times[0] > self.window:
            self._times.popleft()
        pause = self.pause * 2 ** len(self._times)
        self._times.append(now)
        return float(min(pause, self.longest))


class Supervisor:
    """The processes of one plan, as one: when one ends, all do."""

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self._commands = commands
        self._processes: list[Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._words: list[deque[str]] = []
        self.was_killed = False  # by somebody, the last time that `wait` returned

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def stopped(self) -> str:
        """Which process somebody has stopped (SIGSTOP), so that it gives no sign of life; or ""."""
        found = (rank for rank, each in enumerate(self._processes) if _is_stopped(each.pid))
        return next((worker_name(rank, len(self._processes)) for rank in found), "")

    async def start(self) -> None:
        """Start all. Raises OSError."""
        assert not self._processes, "already started"
        for command in self._commands:
            words: deque[str] = deque(maxlen=LAST_WORDS)
            # A pipe of our own: Process.wait would wait for grandchildren that hold asyncio's.
            reading, writing = os.pipe()
            self._readers.append(asyncio.create_task(_listen(reading, words)))
            self._words.append(words)
            try:
                # A session of its own: Ctrl-C is for us, and we end the workers in order.
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=writing,
                    start_new_session=True,
                )
            except OSError:
                os.close(writing)
                self.kill()
                await self._reap()
                raise
            os.close(writing)
            self._processes.append(process)

    async def wait(self) -> str:
        """Wait until one process has ended, end the others, and say why."""
        waits = [asyncio.create_task(process.wait()) for process in self._processes]
        try:
            done: set[asyncio.Task[int]] = set()
            while not done:
                before = oom_kills()
                done, _ = await asyncio.wait(
                    waits, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        codes = [process.returncode for process in self._processes]
        ended = [rank for rank, code in enumerate(codes) if code is not None]
        # One that a signal has ended, or that was told to end, is the cause of others' ends.
        first = min(ended, key=lambda rank: (codes[rank] or 0) > 0)
        who, words = worker_name(first, len(codes)), self._words[first]
        # The kernel's kill is no person's: whatever took the memory would take it again.
        is_starved = codes[first] == -signal.SIGKILL and oom_kills() > before
        self.was_killed = not is_starved and codes[first] in (-signal.SIGKILL, -signal.SIGTERM, 0)
        self.kill()
        await self._reap()
        reason = _reason(who, codes[first] or 0, words)
        return f"{reason} (the kernel had run out of memory)" if is_starved else reason

    def kill(self) -> None:
        """End all at once, whatever they do; also stopped ones."""
        self._signal(signal.SIGKILL)

    async def stop(self, was_asked: bool = True) -> None:
        """End all within about two seconds. was_asked: they have been told to end by message."""
        if was_asked and await self._ended(ASK_SECONDS):
            return
        self._signal(signal.SIGTERM)
        if not await self._ended(TERM_SECONDS):
            self.kill()
        await self._reap()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.send_signal(number)

    async def _ended(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._reap(), seconds)
        except TimeoutError:
            return False
        return True

    async def _reap(self) -> None:
        """Wait for the end of all, and for the last of what they say."""
        for process in self._processes:
            await process.wait()
        if self._readers:
            # A grandchild may hold the pipe open; its words are not waited for.
            _, open_readers = await asyncio.wait(self._readers, timeout=0.5)
            for reader in open_readers:
                reader.cancel()
            await asyncio.gather(*open_readers, return_exceptions=True)
        self._processes, self._readers, self._words = [], [], []


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # it has ended, or this is not Linux
        return False
    return state == "T"


async def _listen(pipe: int, words: deque[str]) -> None:
    """Pass a worker's standard error on, and remember its end."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(pipe, "rb", 0)
    )
    try:
        while not stream.at_eof():
            try:
                line = await stream.readline()
            except ValueError:  # longer than the reader's buffer: dropped
                continue
            text = line.decode(errors="replace").rstrip()
            if text:
                _pass_on(text)
            if text and NEWS not in text:
                words.append(text)
    finally:
        transport.close()


def _pass_on(text: str) -> None:
    if sys.stderr is not None:
        with suppress(OSError):  # nobody reads ours: the worker's is read all the same
            sys.stderr.write(text + "\n")


def oom_kills() -> int:
    """How many processes the kernel has ended for want of memory, here and in all; 0: unknown."""
    return sum(_counted(path) for path in (Path("/proc/vmstat"), *_memory_events()))


def _memory_events() -> list[Path]:
    """Of our control group, where a container's own count is."""
    try:
        line = Path("/proc/self/cgroup").read_text().splitlines()[-1]
    except (OSError, IndexError):
        return []
    return [Path("/sys/fs/cgroup") / line.partition("::")[2].lstrip("/") / "memory.events"]


def _counted(path: Path) -> int:
    try:
        found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def worker_name(rank: int, ranks: int) -> str:
    """For people."""
    return f"the worker of rank {rank}" if ranks > 1 else "the worker"


def _reason(who: str, code: int, words: Sequence[str]) -> str:
    if code < 0:
        try:
            how = f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            how = f"was ended by signal {-code}"
    else:
        how = f"ended with exit code {code}"
    return f"{who} {how}" + (f": {words[-1]}" if words else "")
