"""The ranks of a Plan as processes that a bench drives like one Engine.

Plays the gateway over ZeroMQ: every Step to all, Results from the one that answers. What a bench
times this way includes that way; a Step is on it while the one before is computed.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq
from voltapile.gateway.cli.bench_load import Driven
from voltapile.gateway.supervisor import plan_file, worker_command
from voltapile.shm.gguf import Gguf
from voltapile.topology.endpoint import private_endpoint
from voltapile.topology.plan import Plan, sealed
from voltapile.workers.engine import open_engine
from voltapile.workers.protocol import Failed, Ready, Result, Step, Stop, decode, encode

PATIENCE = 600.0  # seconds until all have loaded, and for one Result
ENDS_SECONDS = 10.0
POLL_MS = 200


class Ranks:
    """`plan`, `gguf`, `submit`, `collect` and `run` are an Engine's."""

    def __init__(
        self,
        plan: Plan,
        gguf: Gguf,
        socket: zmq.Socket[bytes],
        workers: list[subprocess.Popen[bytes]],
    ) -> None:
        self.plan, self.gguf, self._socket, self._workers = plan, gguf, socket, workers
        self._names = {f"text-{rank.rank}".encode() for rank in plan.ranks}

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def wait(self) -> None:
        """Until all have loaded. Raises RuntimeError."""
        missing = set(self._names)
        while missing:
            name, message = self._next()
            if isinstance(message, Ready):
                missing.discard(name)

    def submit(self, step: Step) -> Step:
        frames = encode(step)
        for name in self._names:
            self._socket.send_multipart([name, *frames])
        return step

    def collect(self, step: Step) -> Result:
        while True:
            _, message = self._next()
            if isinstance(message, Result):
                return message

    def run(self, step: Step) -> Result:
        return self.collect(self.submit(step))

    def forget(self) -> None:
        """Set all slots free."""
        self.run(Step(id=0, release=list(range(self.plan.slots))))

    def stop(self) -> None:
        for name in self._names:
            self._socket.send_multipart([name, *encode(Stop(reason="the bench ends"))])
        deadline = time.monotonic() + ENDS_SECONDS
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(max(0.0, deadline - time.monotonic()))

    def _next(self) -> tuple[bytes, object]:
        deadline = time.monotonic() + PATIENCE
        while not self._socket.poll(POLL_MS):
            ended = [worker.poll() for worker in self._workers if worker.poll() is not None]
            if ended:
                raise RuntimeError(f"a worker ended with exit code {ended[0]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no word from the workers for {PATIENCE:.0f} s")
        name, *frames = self._socket.recv_multipart()
        message = decode(frames)
        if isinstance(message, Failed):
            raise RuntimeError(message.reason)
        return name, message


def open_driven(plan: Plan, is_dummy: bool = False) -> contextlib.AbstractContextManager[Driven]:
    """One rank in this process, or several in their own."""
    if len(plan.ranks) > 1:
        return open_ranks(plan, is_dummy)
    return open_engine(plan, is_dummy=is_dummy)


@contextlib.contextmanager
def open_ranks(plan: Plan, is_dummy: bool = False) -> Iterator[Ranks]:
    """All ranks, loaded; they end with the context. They meet at an address of their own."""
    plan = sealed(msgspec.structs.replace(plan, id="", endpoint=private_endpoint()))
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(plan_file(plan))
        context = stack.enter_context(zmq.Context())
        socket = stack.enter_context(context.socket(zmq.ROUTER))
        socket.linger = 0
        socket.bind(plan.endpoint)
        gguf = stack.enter_context(Gguf.open(Path(plan.model[0])))
        extra = ["--dummy"] if is_dummy else []
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for rank in plan.ranks:
                command = [*worker_command(path, rank.rank), *extra]
                workers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            ranks = Ranks(plan, gguf, socket, workers)
            ranks.wait()
            yield ranks
            ranks.stop()
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
