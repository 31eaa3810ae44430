"""Ranks that meet through the Board: by threads here, since only the Board connects them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from voltapile.kernels.group import GroupError, shared_memory
from voltapile.shm.board import Board
from voltapile.shm.segment import Segment, SegmentError
from voltapile.workers import group as group_module
from voltapile.workers.group import MOST_BYTES, BoardGroup, meet

RANKS = 4


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(f"test-{uuid4().hex[:12]}", RANKS)
    for rank in range(RANKS):
        board.join(rank)
    yield board
    board.close()


def in_threads(work: Callable[[int], Any], ranks: range = range(RANKS)) -> dict[int, Any]:
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found


def test_all_get_what_each_one_sends(board: Board) -> None:
    def work(rank: int) -> list[list[bytes]]:
        rng = np.random.default_rng(rank)
        time.sleep(rng.random() * 0.05)
        group = meet("p", board, rank)
        found = []
        for i in range(50):
            time.sleep(rng.random() * 2e-3)
            found.append(group.exchange(bytes([rank, i]) * (i * 20)))
        found.append(group.exchange(bytes([rank]) * MOST_BYTES))
        return found

    results = in_threads(work)
    for found in results.values():
        for i, letters in enumerate(found[:-1]):
            assert letters == [bytes([rank, i]) * (i * 20) for rank in range(RANKS)]
        assert found[-1] == [bytes([rank]) * MOST_BYTES for rank in range(RANKS)]


def test_a_name_is_shared_and_new_at_every_start(board: Board) -> None:
    names = [set(in_threads(lambda rank: meet("p", board, rank).name).values()) for _ in range(3)]
    assert all(len(name) == 1 for name in names)
    assert len(set.union(*names)) == 3


def test_what_a_dead_rank_has_left_is_not_believed(board: Board) -> None:
    in_threads(lambda rank: meet("p", board, rank).exchange(b"old"))
    late = threading.Event()

    def work(rank: int) -> list[bytes]:
        if rank == 2:
            late.wait(5)
        return meet("p", board, rank).exchange(b"new")

    threading.Timer(0.3, late.set).start()
    began = time.monotonic()
    results = in_threads(work)
    assert time.monotonic() - began > 0.29
    assert all(found == [b"new"] * RANKS for found in results.values()), results


def test_a_rank_that_starts_twice_is_met_in_its_last_life(board: Board) -> None:
    first = BoardGroup("p", board, 1, 5.0)
    with pytest.raises(GroupError, match="rank 1 has waited 0 s for rank 0 to come; is it started"):
        first.meet(0.1)
    results = in_threads(lambda rank: meet("p", board, rank).exchange(bytes([rank])))
    assert all(found == [bytes([rank]) for rank in range(RANKS)] for found in results.values())


def test_who_is_missing_is_named(board: Board) -> None:
    results = in_threads(lambda rank: meet("p", board, rank, start_seconds=0.3), range(3))
    for rank in range(3):
        assert f"rank {rank} has waited 0 s for rank 3 to come" in str(results[rank])
        assert board.health(rank).waits_for == 3


def test_an_exchange_waits_for_a_rank_that_shows_life(board: Board) -> None:
    def work(rank: int) -> list[bytes]:
        group = meet("p", board, rank, seconds=0.2)
        if rank == 3:  # loads
            for _ in range(16):
                time.sleep(0.05)
                board.beat(rank)
        return group.exchange(b"")

    assert all(found == [b""] * RANKS for found in in_threads(work).values())


def test_an_exchange_with_a_rank_that_lives_has_an_end(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would not where ranks disagree on the order of exchanges."""
    monkeypatch.setattr(group_module, "EXCHANGE_SECONDS", 0.2)

    def work(rank: int) -> Any:
        group = meet("p", board, rank)
        return group.exchange(b"") if rank else None

    found = in_threads(work)
    assert all("rank 0 was to tell; it lives" in str(found[rank]) for rank in range(1, RANKS))


def test_an_exchange_gives_up_on_a_rank_that_shows_none(board: Board) -> None:
    def work(rank: int) -> list[bytes]:
        group = meet("p", board, rank, seconds=0.2)
        return [] if rank == 3 else group.exchange(b"")

    results = in_threads(work)
    for rank in range(3):
        assert isinstance(results[rank], GroupError)
        assert f"rank {rank} has waited" in str(results[rank])
        assert "for rank 3, which has shown no life" in str(results[rank])


def test_an_abort_ends_a_wait(board: Board) -> None:
    threading.Timer(0.2, lambda: board.abort("for a test")).start()
    results = in_threads(lambda rank: meet("p", board, rank), range(3))
    for error in results.values():
        assert isinstance(error, GroupError)
        assert str(error).endswith(": for a test")


def test_a_letter_that_stays_torn_is_not_waited_for_forever(board: Board) -> None:
    groups = in_threads(lambda rank: meet("p", board, rank))
    threading.Timer(0.2, lambda: board.abort("for a test")).start()

    def work(rank: int) -> list[bytes]:
        if rank == 3:
            record = groups[rank]._records[rank]
            record["length"], record["check"], record["written"] = 3, 1, 1
            return []
        found: list[bytes] = groups[rank].exchange(b"whole")
        return found

    results = in_threads(work)
    for rank in range(3):
        assert str(results[rank]).endswith(f"while rank {rank} waited for rank 3: for a test")


def test_shared_memory_has_no_name_left(board: Board) -> None:
    def work(rank: int) -> int:
        segment = shared_memory(meet("test-p", board, rank), 4096)
        values = segment.array(np.int32, (RANKS,))
        values[rank] = rank + 1
        deadline = time.monotonic() + 5
        while not values.all() and time.monotonic() < deadline:
            time.sleep(1e-3)
        assert not segment.path.exists()
        return int(values.sum())

    assert set(in_threads(work).values()) == {10}


def test_all_learn_that_there_is_no_shared_memory(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Segment:
        raise SegmentError("4096 bytes of shared memory: No space left on device")

    monkeypatch.setattr(Segment, "create", refuse)
    results = in_threads(lambda rank: shared_memory(meet("test-p", board, rank), 4096))
    for error in results.values():
        assert isinstance(error, SegmentError)
        assert "No space left" in str(error)
