"""Collectives of several processes: the same bits on all ranks, and no wait without an end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from voltapile.kernels.group import GroupError
from voltapile.kernels.load import load
from voltapile.kernels.ops import Array, Ops
from voltapile.shm.board import Board
from voltapile.workers.group import BoardGroup, meet

Work = Callable[[Ops, BoardGroup], Any]
FORK = multiprocessing.get_context("fork")
PATIENCE = 60.0


class Ranks:
    """Processes that each run `work`; results() gives what it returned or raised."""

    def __init__(
        self, ranks: int, work: Work, backend: str = "cpu", threads: int = 1, seconds: float = 20.0
    ) -> None:
        self.name = f"test-{uuid4().hex[:12]}"
        self.board = Board.create(self.name, ranks)
        self.processes, self.pipes = [], []
        for rank in range(ranks):
            mine, theirs = FORK.Pipe(duplex=False)
            args = self.name, rank, ranks, work, backend, threads, seconds, theirs
            process = FORK.Process(target=live, args=args)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(mine)

    def result(self, rank: int) -> Any:
        pipe = self.pipes[rank]
        assert pipe in wait([pipe], PATIENCE), f"rank {rank} hangs"
        return pipe.recv()

    def results(self) -> list[Any]:
        return [self.result(rank) for rank in range(len(self.pipes))]

    def kill(self, rank: int, number: int) -> None:
        pid = self.processes[rank].pid
        assert pid
        os.kill(pid, number)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.board.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def live(
    name: str,
    rank: int,
    ranks: int,
    work: Work,
    backend: str,
    threads: int,
    seconds: float,
    pipe: Connection,
) -> None:
    try:
        board = Board.open(name, ranks)
        board.join(rank)
        beat, abort = board.heartbeat_address(rank), board.abort_address
        ops = load(backend, threads, 64 << 20, None, beat, abort)
        group = meet(name, board, rank, seconds, PATIENCE)
        ops.join(group)
        answer: Any = work(ops, group)
    except Exception as error:
        answer = error
    pipe.send(answer)
    os._exit(0)  # nothing of pytest's own end


def parts_of(seed: int, ranks: int, shape: Sequence[int]) -> list[Array]:
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-3, 4, (ranks, *shape))
    return list((rng.standard_normal((ranks, *shape)) * scale).astype(np.float32))


def in_order(parts: Sequence[Array]) -> Array:
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def nap(rng: np.random.Generator) -> None:
    if rng.random() < 0.3:
        time.sleep(rng.random() * 2e-3)


# --- sums -----------------------------------------------------------------------------------

SHAPES = [(1, 1), (1, 64), (1, 576), (3, 1000), (2, 4096), (5, 4099), (64, 4096), (301, 1537)]


def sums(ops: Ops, group: BoardGroup) -> list[Array]:
    """Of each shape: the sum, the sum added to a residual, and one where only odd ranks add."""
    rng, found = np.random.default_rng(group.rank), []
    for seed, shape in enumerate(SHAPES):
        mine = parts_of(seed, group.ranks, shape)[group.rank]
        residual = parts_of(seed + 50, 1, shape)[0]
        nap(rng)
        found.append(ops.to_host(ops.all_reduce(mine, shape)))
        nap(rng)
        assert ops.all_reduce(mine, shape, residual) is residual
        found.append(residual)
        found.append(ops.to_host(ops.all_reduce(mine if group.rank % 2 else None, shape)))
        ops.reset_scratch()
    return found


def sums_of(ranks: int) -> list[Array]:
    expected = []
    for seed, shape in enumerate(SHAPES):
        parts = parts_of(seed, ranks, shape)
        odd = [part if i % 2 else np.zeros_like(part) for i, part in enumerate(parts)]
        total = in_order(parts)
        expected += [total, parts_of(seed + 50, 1, shape)[0] + total, in_order(odd)]
    return expected


@pytest.mark.parametrize(("ranks", "threads"), [(1, 1), (2, 1), (3, 2), (4, 1), (6, 1)])
def test_all_reduce_gives_all_ranks_the_bits_of_the_sum_in_order(ranks: int, threads: int) -> None:
    with Ranks(ranks, sums, threads=threads) as group:
        check_all(group.results(), sums_of(ranks))


@pytest.mark.parametrize("ranks", [1, 3])
def test_reference_all_reduce(ranks: int) -> None:
    with Ranks(ranks, sums, "reference") as group:
        check_all(group.results(), sums_of(ranks))


def check_all(results: list[Any], expected: list[Array]) -> None:
    for rank, found in enumerate(results):
        assert not isinstance(found, Exception), found
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one.shape == other.shape
            assert one.tobytes() == other.tobytes(), (rank, i)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_alone_a_sum_is_the_part(backend: str) -> None:
    ops = load(backend, 1, 1 << 20)
    part, residual = parts_of(1, 2, (3, 40))
    assert (ops.all_reduce(part, (3, 40)) == part).all()
    assert not ops.all_reduce(None, (3, 40)).any()
    expected = residual + part
    assert ops.all_reduce(part, (3, 40), residual) is residual
    assert (residual == expected).all()
    assert (ops.all_gather(part, 3, [40]) == part).all()
    ops.broadcast_(part, 0)


# --- the others -----------------------------------------------------------------------------

GATHERS = [(1, 3), (7, 64), (64, 1000), (2, 150_001)]


def gathers(ops: Ops, group: BoardGroup) -> list[Array]:
    rng, found = np.random.default_rng(group.rank), []
    for seed, (rows, width) in enumerate(GATHERS):
        widths = widths_of(width, group.ranks)
        mine = parts_of(seed, group.ranks, (rows, width))[group.rank]
        mine = np.ascontiguousarray(mine[:, : widths[group.rank]])
        nap(rng)
        part = None if widths[group.rank] == 0 else mine
        found.append(ops.to_host(ops.all_gather(part, rows, widths)))
        ops.reset_scratch()
    return found


def widths_of(width: int, ranks: int) -> list[int]:
    return [width if rank % 3 == 0 else width // (rank % 3) // 2 for rank in range(ranks)]


def gathers_of(ranks: int) -> list[Array]:
    expected = []
    for seed, (rows, width) in enumerate(GATHERS):
        parts = parts_of(seed, ranks, (rows, width))
        widths = widths_of(width, ranks)
        expected.append(np.hstack([p[:, :w] for p, w in zip(parts, widths, strict=True)]))
    return expected


@pytest.mark.parametrize(
    ("ranks", "threads", "backend"), [(2, 2, "cpu"), (5, 1, "cpu"), (2, 1, "reference")]
)
def test_all_gather(ranks: int, threads: int, backend: str) -> None:
    with Ranks(ranks, gathers, backend, threads) as group:
        check_all(group.results(), gathers_of(ranks))


def broadcasts(ops: Ops, group: BoardGroup) -> list[Array]:
    rng, found = np.random.default_rng(group.rank), []
    for seed in range(40):
        source = seed % group.ranks
        floats = parts_of(seed, 1, (1 + 40_000 * (seed % 5),))[0]
        ints = np.arange(seed, 2 * seed + 1, dtype=np.int32)
        if group.rank != source:
            floats[...], ints[...] = 0, 0
        nap(rng)
        ops.broadcast_(floats, source)
        ops.broadcast_(ints, source)
        found += [floats, ints]
    return found


@pytest.mark.parametrize(("ranks", "backend"), [(2, "cpu"), (4, "cpu"), (3, "reference")])
def test_broadcast(ranks: int, backend: str) -> None:
    expected = []
    for seed in range(40):
        expected.append(parts_of(seed, 1, (1 + 40_000 * (seed % 5),))[0])
        expected.append(np.arange(seed, 2 * seed + 1, dtype=np.int32))
    with Ranks(ranks, broadcasts, backend) as group:
        check_all(group.results(), expected)


def passing(ops: Ops, group: BoardGroup) -> list[Array]:
    """From each rank to the next: what the first one sends comes out of the last one."""
    rng, found = np.random.default_rng(group.rank), []
    for seed in range(60):
        shape = (1 + 13 * (seed % 7), 1 + 777 * (seed % 5))
        x = parts_of(seed, 1, shape)[0]
        nap(rng)
        if group.rank:
            x = ops.receive(shape, group.rank - 1)
        found.append(ops.to_host(x))
        if group.rank < group.ranks - 1:
            ops.send(x, group.rank + 1)
            x[...] = -1.0
        ops.reset_scratch()
    return found


@pytest.mark.parametrize(("ranks", "backend"), [(2, "cpu"), (5, "cpu"), (3, "reference")])
def test_messages_arrive_in_order(ranks: int, backend: str) -> None:
    expected = [
        parts_of(seed, 1, (1 + 13 * (seed % 7), 1 + 777 * (seed % 5)))[0] for seed in range(60)
    ]
    with Ranks(ranks, passing, backend) as group:
        check_all(group.results(), expected)


def test_two_messages_do_not_wait_for_the_receiver() -> None:
    def work(ops: Ops, group: BoardGroup) -> float:
        x = np.ones((4, 1024), np.float32)
        began = time.monotonic()
        if group.rank == 0:
            ops.send(x, 1)
            ops.send(x, 1)
        else:
            time.sleep(1.0)
            ops.receive((4, 1024), 0)
            ops.receive((4, 1024), 0)
        return time.monotonic() - began

    for backend in ("cpu", "reference"):
        with Ranks(2, work, backend) as group:
            assert group.result(0) < 0.9


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_place_puts_columns_among_zeros(backend: str) -> None:
    ops = load(backend, 2, 1 << 20)
    x = parts_of(0, 1, (5, 30))[0]
    found = ops.place(x, 100, 64)
    assert (found[:, 64:94] == x).all()
    assert not found[:, :64].any()
    assert not found[:, 94:].any()


# --- replays --------------------------------------------------------------------------------


def replays(ops: Ops, group: BoardGroup) -> list[Array]:
    """Many replays of a recorded step with every collective, with a pause here and there."""
    rng, ranks = np.random.default_rng(group.rank), group.ranks
    x = np.zeros((4, 256), np.float32)
    part = np.full((4, 256), 1.0 + group.rank, np.float32)
    flag = np.full(8, group.rank, np.int32)
    with ops.capture() as graph:
        for _ in range(4):
            ops.all_reduce(part, (4, 256), x)
        wide = ops.all_gather(part, 4, [256] * ranks)
        if group.rank == 0:
            ops.send(x, ranks - 1)
        if group.rank == ranks - 1:
            ops.receive((4, 256), 0)
        ops.broadcast_(flag, ranks - 1)
    for _ in range(500):
        nap(rng)
        graph.replay()
    return [x, wide.copy(), flag]


@pytest.mark.parametrize("ranks", [2, 6])
def test_replays_with_random_pauses(ranks: int) -> None:
    total = 500 * 4 * sum(range(1, ranks + 1))
    wide = np.hstack([np.full((4, 256), 1.0 + rank, np.float32) for rank in range(ranks)])
    expected = [np.full((4, 256), total, np.float32), wide, np.full(8, ranks - 1, np.int32)]
    with Ranks(ranks, replays) as group:
        check_all(group.results(), expected)


# --- a rank that is gone --------------------------------------------------------------------


def forever(ops: Ops, group: BoardGroup) -> None:
    part = np.ones((2, 100), np.float32)
    while True:
        ops.reset_scratch()
        ops.all_reduce(part, (2, 100))
        time.sleep(1e-3)


@pytest.fixture(params=["cpu", "reference"])
def three(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(3, forever, request.param, seconds=1.0) as group:
        deadline = time.monotonic() + PATIENCE
        while not all(group.board.health(rank).age < 1e9 for rank in range(3)):
            assert time.monotonic() < deadline
        time.sleep(0.5)
        yield group


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_ends_the_others_in_time(three: Ranks, number: int) -> None:
    began = time.monotonic()
    three.kill(1, number)
    for rank in (0, 2):
        error = three.result(rank)
        assert isinstance(error, GroupError), error
        assert f"rank {rank} has waited 1." in str(error)
        assert "s for rank 1, which has not come" in str(error)
        assert three.board.health(rank).waits_for == 1
    assert time.monotonic() - began < 10.0


def test_an_abort_ends_all_at_once(three: Ranks) -> None:
    three.kill(1, signal.SIGSTOP)
    time.sleep(0.3)
    three.board.abort("a test")
    began = time.monotonic()
    for rank in (0, 2):
        assert "ended while rank" in str(three.result(rank)) or "aborted" in str(three.result(rank))
    assert time.monotonic() - began < 0.9


def test_a_signal_is_handled_while_waiting() -> None:
    def work(ops: Ops, group: BoardGroup) -> str:
        def stop(*_: object) -> None:
            raise InterruptedError("told to stop")

        signal.signal(signal.SIGUSR1, stop)
        try:
            if group.rank == 0:
                ops.all_reduce(np.ones((1, 10), np.float32), (1, 10))
        except InterruptedError as error:
            return str(error)
        return ""

    with Ranks(2, work) as group:
        group.result(1)
        time.sleep(0.3)
        began = time.monotonic()
        group.kill(0, signal.SIGUSR1)
        assert group.result(0) == "told to stop"
        assert time.monotonic() - began < 1.0


def test_after_an_error_nothing_runs() -> None:
    def work(ops: Ops, group: BoardGroup) -> list[str]:
        part, errors = np.ones((1, 10), np.float32), []
        if group.rank:
            return []
        for _ in range(2):
            with pytest.raises(GroupError) as error:
                ops.all_reduce(part, (1, 10))
            errors.append(str(error.value))
        return errors

    with Ranks(2, work, seconds=0.3) as group:
        first, second = group.result(0)
        assert first == second
        assert "for rank 1, which has not come" in first
