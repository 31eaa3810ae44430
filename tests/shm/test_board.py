"""Board: what ranks say of themselves is seen by other processes, and so is the abort flag."""

from __future__ import annotations

import ctypes
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from voltapile.shm.board import Board
from voltapile.shm.segment import Segment, SegmentError


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(f"test-{secrets.token_hex(6)}", 3)
    yield board
    board.close()


def plan_id(board: Board) -> str:
    return board.segment.path.name.removeprefix("voltapile-").removesuffix("-board")


def test_a_new_board_has_nobody(board: Board) -> None:
    health = board.health(2)
    assert (health.pid, health.state, health.stage, health.step) == (0, "empty", "", -1)
    assert health.waits_for == -1
    assert health.age == float("inf")
    assert not board.is_alive(2, 1e9)
    assert board.aborted is None


def test_publish(board: Board) -> None:
    board.join(1)
    board.publish(1, "loading", "wéights " + "é" * 200, 0.25)
    board.begin_step(1, 2**40)
    board.wait_for(1, 2)
    health = board.health(1)
    assert (health.state, health.fraction, health.step) == ("loading", 0.25, 2**40)
    assert health.waits_for == 2
    assert health.stage.startswith("wéights éé")
    assert len(health.stage.encode()) <= 188
    assert board.health(0).state == board.health(2).state == "empty"
    board.join(1)
    assert (board.health(1).step, board.health(1).waits_for, board.health(1).stage) == (-1, -1, "")


def test_alive_needs_a_heartbeat_and_a_process(board: Board) -> None:
    board.join(0)
    assert board.is_alive(0, 5)
    ctypes.c_uint64.from_address(board.heartbeat_address(0)).value = time.monotonic_ns() - 10**10
    assert 10 <= board.health(0).age < 11
    assert not board.is_alive(0, 5)
    assert board.is_alive(0, 60)
    board.beat(0)
    assert board.is_alive(0, 5)


def test_addresses_are_those_of_the_documented_layout(board: Board) -> None:
    base = board.segment.address
    assert board.abort_address == base + 16
    assert board.heartbeat_address(2) == base + 3 * 4096
    board.beat(2)
    beat = ctypes.c_uint64.from_address(board.heartbeat_address(2)).value
    assert 0 <= time.monotonic_ns() - beat < 10**9
    flag = ctypes.c_uint32.from_address(board.abort_address)
    assert flag.value == 0
    board.abort("rank 1 is gone")
    assert flag.value != 0
    assert board.aborted == "rank 1 is gone"
    board.clear_abort()
    assert flag.value == 0
    assert not board.aborted
    board.abort("x" * 1000)
    assert board.aborted == "x" * 448


def test_handles_are_apart(board: Board) -> None:
    board.handles(0)[:] = 1
    board.handles(2)[:] = 3
    assert board.handles(1).max() == 0
    assert board.handles(0).shape == (56, 64)
    assert board.health(1).pid == 0
    assert board.aborted is None


CHILD = """
import sys, time
from voltapile.shm.board import Board
board = Board.open(sys.argv[1], 3)
board.join(2)
board.publish(2, "ready", "serving", 1.0)
while board.aborted is None:
    board.beat(2)
    time.sleep(0.005)
board.publish(2, "stopped", board.aborted)
"""


def test_across_processes(board: Board) -> None:
    process = subprocess.Popen([sys.executable, "-c", CHILD, plan_id(board)])
    try:
        deadline = time.monotonic() + 30
        while board.health(2).state != "ready":
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        assert board.health(2).pid == process.pid
        assert board.is_alive(2, 5)
        board.abort("stop, please")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    assert (board.health(2).state, board.health(2).stage) == ("stopped", "stop, please")
    assert not board.is_alive(2, 60)  # its process is gone, however young the heartbeat


def test_open_checks_the_layout(board: Board) -> None:
    with pytest.raises(SegmentError, match="expected at least"):
        Board.open(plan_id(board), 4)
    with pytest.raises(SegmentError, match=r"found \(magic, version, ranks\)"):
        Board.open(plan_id(board), 2)
    name = f"test-{secrets.token_hex(6)}"
    with Segment.create(name, "board", 8192), pytest.raises(SegmentError, match="expected"):
        Board.open(name, 1)
