"""Ranks that come to a Board and go: who ends a group, and when the next one may begin."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from uuid import uuid4

import pytest
from voltapile.kernels.group import GroupError
from voltapile.shm.board import Board
from voltapile.workers import seat as seat_module
from voltapile.workers.claim import UNSEEN
from voltapile.workers.seat import Seat


@pytest.fixture
def name() -> str:
    return f"test-{uuid4().hex[:12]}"


@pytest.fixture
def seats(name: str) -> Iterator[list[Seat]]:
    seats = [Seat(name, 2, rank) for rank in range(2)]
    yield seats
    for seat in seats:
        if hasattr(seat, "board"):
            seat.board.close()


def test_the_first_makes_the_board(seats: list[Seat]) -> None:
    boards = [seat.join() for seat in seats]
    assert [board.segment.is_owner for board in boards] == [True, False]
    assert [board.aborted for board in boards] == [None, None]
    for seat in seats:
        seat.check_mates()


def test_both_at_once(name: str) -> None:
    for _ in range(20):
        seats = [Seat(name, 2, rank) for rank in range(2)]
        threads = [threading.Thread(target=seat.join) for seat in seats]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(seat.board.segment.is_owner for seat in seats) == 1
        for seat in seats:
            seat.board.close()


def test_the_first_reason_counts(seats: list[Seat]) -> None:
    for seat in seats:
        seat.join()
    assert seats[1].leave("no memory") == "rank 1: no memory"
    assert seats[0].leave("the group was ended") == "rank 1: no memory"
    assert seats[0].board.aborted == "rank 1: no memory"


ORPHAN = """
import sys, time
from voltapile.workers.claim import UNSEEN
from voltapile.workers.seat import Seat
seat = Seat(sys.argv[1], 2, 0)
seat.join()
seat.board.segment.unlink()  # as its gateway does when it ends
print("ready", flush=True)
time.sleep(60)
"""


def test_a_rank_without_its_board_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch, seats: list[Seat]
) -> None:
    monkeypatch.setattr(seat_module, "PREDECESSORS_SECONDS", 0.2)
    command = [sys.executable, "-c", ORPHAN, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as orphan:
        assert orphan.stdout is not None
        assert orphan.stdout.readline() == "ready\n"
        seats[1].join()  # another rank may come
        with pytest.raises(GroupError, match=f"rank 0 runs as pid {orphan.pid}, whose gateway"):
            seats[0].join()
        monkeypatch.setattr(seat_module, "PREDECESSORS_SECONDS", 10.0)
        threading.Timer(0.2, orphan.kill).start()  # it ends while we wait for that
        seats[0].join()


def test_a_rank_that_is_not_seen_from_here(
    monkeypatch: pytest.MonkeyPatch, seats: list[Seat]
) -> None:
    """As in another container that has the same shared memory and network."""
    monkeypatch.setattr(seat_module, "PREDECESSORS_SECONDS", 0.1)
    monkeypatch.setattr(seat_module.Claim, "take", lambda self: UNSEEN)
    with pytest.raises(GroupError, match="rank 0 runs as a process that is not seen from here"):
        seats[0].join()


def test_alone_nobody_is_told(name: str) -> None:
    seat = Seat(name, 1, 0)
    seat.join()
    seat.check_mates()
    assert seat.leave("no memory") == ""
    assert seat.board.aborted is None
    seat.board.close()


def test_a_mate_that_has_ended(seats: list[Seat]) -> None:
    for seat in seats:
        seat.join()
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    seats[0].board._ranks["pid"][1] = child.pid
    with pytest.raises(GroupError, match="rank 1 has ended"):
        seats[0].check_mates()


def test_a_group_that_was_ended_is_outlived(name: str, seats: list[Seat]) -> None:
    gateway = Board.create(name, 2)
    seats[0].join()
    seats[0].leave("done for")
    threading.Timer(0.3, lambda: gateway.publish(0, "failed")).start()
    began = time.monotonic()
    seats[1].join()
    assert time.monotonic() - began > 0.25
    assert gateway.aborted is None
    gateway.close()


def test_one_that_does_not_go(
    name: str, seats: list[Seat], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seat_module, "PREDECESSORS_SECONDS", 0.2)
    seats[0].join()
    seats[0].leave("done for")
    beating = threading.Event()

    def beat() -> None:
        while not beating.wait(0.05):
            seats[0].board.beat(0)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(GroupError, match="still there: rank 0: done for"):
            seats[1].join()
    finally:
        beating.set()
        thread.join()
    assert seats[0].board.health(0).pid == os.getpid()


def test_one_that_comes_again_ends_its_group(name: str, seats: list[Seat]) -> None:
    for seat in seats:
        seat.join()
    again = Seat(name, 2, 1)
    threading.Timer(0.3, lambda: seats[0].board.publish(0, "failed")).start()
    board = again.join()
    assert board.health(0).state == "failed"
    assert board.aborted is None
    assert board.health(1).state == "loading"
    board.close()


def test_one_that_runs_keeps_its_seat(name: str, seats: list[Seat]) -> None:
    for seat in seats:
        seat.join()
    board = seats[0].board
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        board._ranks["pid"][1] = child.pid
        again = Seat(name, 2, 1)
        with pytest.raises(GroupError, match=f"rank 1 runs as pid {child.pid}"):
            again.join()
        again.board.close()
        assert board.aborted is None
        assert board.health(1).pid == child.pid
        board._ranks["heartbeat"][1] -= 60 * 10**9  # it hangs: this one takes its place
        board.publish(0, "failed")
        again.join()
        assert board.health(1).pid == os.getpid()
        again.board.close()
    finally:
        child.communicate()


def test_why_a_group_ends(seats: list[Seat]) -> None:
    for seat in seats:
        seat.join()
    board = seats[0].board
    assert seats[0].cause() == ""
    board.publish(1, "stopped")
    assert seats[0].cause() == "stopped"
    board.publish(1, "ready")
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    board._ranks["pid"][1] = child.pid
    assert seats[0].cause() == "gone"
    board.publish(1, "failed")  # it has told why
    assert seats[0].cause() == ""
