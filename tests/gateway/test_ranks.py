"""Several real workers behind the gateway's engine: any of them may be killed or stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from voltapile.gateway.engine import Engine
from voltapile.gateway.stream import Stream
from voltapile.gateway.supervisor import Pulse, Restarts, Supervisor, plan_file, worker_command
from voltapile.gateway.suspects import KILL
from voltapile.shm.board import Board
from voltapile.shm.segment import SegmentError
from voltapile.topology.plan import Plan, sealed, to_json
from voltapile.workers.protocol import Sampling

Make = Callable[..., Any]
RANKS, TOKENS = 3, 60
PROMPTS = [np.random.default_rng(i).integers(0, 640, 40).tolist() for i in range(3)]
LOSSES = (
    (0, signal.SIGKILL), (2, signal.SIGKILL), (1, signal.SIGSTOP), (1, signal.SIGTERM),
)  # fmt: skip
SAMPLED = {"temperature": 0.8, "top_k": 40, "seed": 5}


@asynccontextmanager
async def serving(
    plan: Plan, command: Callable[[Path, int], list[str]] = worker_command
) -> AsyncIterator[tuple[Engine, Supervisor]]:
    with ExitStack() as files:
        pulse = files.enter_context(Pulse(plan))
        path = files.enter_context(plan_file(plan))
        supervisor = Supervisor([command(path, rank.rank) for rank in plan.ranks])
        async with Engine(plan, supervisor, pulse, 2.0, Restarts(pause=0.01)) as engine:
            yield engine, supervisor


async def until(condition: Callable[[], bool], seconds: float = 40.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def start(engine: Engine, prompt: list[int]) -> Stream:
    return engine.submit(prompt, Sampling(max_position=len(prompt) + TOKENS, **SAMPLED))


async def collect(stream: Stream, tokens: list[int]) -> str:
    async with asyncio.timeout(50):
        async for chunk in stream:
            tokens += chunk.tokens
            if chunk.finish:
                return chunk.finish + chunk.error
    raise AssertionError("a stream without an end")


@pytest.mark.parametrize(("mode", "ahead"), [("tensor", 2), ("layer", 3)])
async def test_any_rank_may_be_lost(
    mini: Path, plan_for: Make, tmp_path: Path, mode: str, ahead: int
) -> None:
    """No token is lost and none comes twice; what is told meanwhile is true."""
    plan = plan_for(
        mini / "llama/model-f16.gguf", "cpu", endpoint=f"ipc://{tmp_path}/s", ranks=RANKS,
        split_mode=mode, threads=RANKS,
    )  # fmt: skip
    plan = sealed(msgspec.structs.replace(plan, steps_in_flight=ahead, id=""))
    async with serving(plan) as (engine, supervisor):
        await until(lambda: engine.health.status == "ok")
        assert sorted(engine.memory) == list(range(RANKS))
        expected = []
        for prompt in PROMPTS:
            expected.append([])
            assert await collect(start(engine, prompt), expected[-1]) == "length"
        for rank, number in LOSSES:
            found: list[list[int]] = [[], []]
            streams = [start(engine, prompt) for prompt in PROMPTS[:2]]
            reading = [asyncio.create_task(collect(streams[i], found[i])) for i in range(2)]
            await until(lambda found=found: all(len(tokens) > 5 for tokens in found))
            os.kill(supervisor.pids[rank], number)
            await until(lambda: engine.health.status == "loading")
            assert f"rank {rank}" in engine.health.reason
            assert max(stream.request.crashes for stream in streams) == KILL
            assert await asyncio.gather(*reading) == ["length", "length"]
            assert found == expected[:2]
        assert engine.stats().restarts == len(LOSSES)
        assert engine.health.status == "ok"


BROKEN = """
import sys
from pathlib import Path
from voltapile.workers import __main__ as program
from voltapile.workers.engine import Engine

def broken(*_):
    if MARK.exists():
        return real(*_)
    MARK.touch()
    raise MemoryError("no room left")

METHOD, MARK = sys.argv.pop(1), Path(sys.argv.pop(1))
real = getattr(Engine, METHOD)
setattr(Engine, METHOD, broken)
sys.exit(program.main())
"""


@pytest.mark.parametrize("method", ["load", "submit"])
async def test_one_rank_fails(mini: Path, plan_for: Make, tmp_path: Path, method: str) -> None:
    """While loading that is the end, in a step all are started again; the reason is its own."""
    plan = plan_for(
        mini / "llama/model-f16.gguf", "cpu", endpoint=f"ipc://{tmp_path}/s", ranks=2, threads=2
    )

    def command(path: Path, rank: int) -> list[str]:
        program = [sys.executable, "-c", BROKEN, method, str(tmp_path / "mark")]
        usual = worker_command(path, rank)
        return [*program, *usual[usual.index("--plan") :]] if rank == 1 else usual

    async with serving(plan, command) as (engine, _):
        if method == "load":
            await until(lambda: engine.health.status == "failed")
            assert "no room left" in engine.health.reason
            return
        await until(lambda: engine.health.status == "ok")
        found: list[int] = []
        reading = asyncio.create_task(collect(start(engine, PROMPTS[0]), found))
        await until(lambda: engine.health.status == "loading")
        assert "no room left" in engine.health.reason
        assert await reading == "length"
        assert len(found) == TOKENS


PROGRAM = "import sys; from voltapile.gateway.cli.main import main; sys.exit(main(sys.argv[1:]))"


def run_beside(plan: Plan, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Once all ranks of the plan are ready."""
    end = time.monotonic() + 40
    while time.monotonic() < end:
        time.sleep(0.05)
        with suppress(SegmentError), closing(Board.open(plan.id, len(plan.ranks))) as board:
            if all(board.health(rank).state == "ready" for rank in range(board.num_ranks)):
                break
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)


async def test_workers_started_by_hand(mini: Path, plan_for: Make, tmp_path: Path) -> None:
    """They outlive a gateway, and end together when one of them ends."""
    plan = plan_for(
        mini / "llama/model-f16.gguf", "cpu", endpoint=f"ipc://{tmp_path}/s", ranks=2, threads=2
    )
    path = tmp_path / "plan.json"
    path.write_bytes(to_json(plan))
    program = [sys.executable, "-c", PROGRAM, "worker", "--plan", str(path), "--rank"]
    workers = [subprocess.Popen([*program, str(i)]) for i in range(2)]
    try:
        twice = await asyncio.to_thread(run_beside, plan, [*program, "0"])
        assert twice.returncode == 1
        assert f"rank 0 runs as pid {workers[0].pid}" in twice.stderr
        tokens: list[list[int]] = []
        for _ in range(2):
            with Pulse(plan) as pulse:
                async with Engine(plan, None, pulse, 2.0) as engine:
                    await until(lambda engine=engine: engine.health.status == "ok")
                    tokens.append([])
                    assert await collect(start(engine, PROMPTS[0]), tokens[-1]) == "length"
                    engine._crew.names.clear()  # a gateway that dies says nothing
        assert tokens[0] == tokens[1]
        workers[0].kill()
        workers[0].wait()
        assert await asyncio.to_thread(workers[1].wait, 10) == 1
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


async def test_one_that_was_stopped_and_started_by_hand(
    mini: Path, plan_for: Make, tmp_path: Path
) -> None:
    """The others end; it does when it goes on."""
    plan = plan_for(
        mini / "llama/model-f16.gguf", "cpu", endpoint=f"ipc://{tmp_path}/s", ranks=2, threads=2
    )
    path = tmp_path / "plan.json"
    path.write_bytes(to_json(plan))
    program = [sys.executable, "-c", PROGRAM, "worker", "--plan", str(path), "--rank"]
    with Pulse(plan) as pulse:
        workers = [subprocess.Popen([*program, str(i)]) for i in range(2)]
        try:
            async with Engine(plan, None, pulse, 2.0) as engine:
                await until(lambda: engine.health.status == "ok")
                workers[1].send_signal(signal.SIGSTOP)
                await until(lambda: engine.health.status == "loading")
                await asyncio.to_thread(workers[0].wait, 10)
                workers[1].send_signal(signal.SIGCONT)
                await asyncio.to_thread(workers[1].wait, 10)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
