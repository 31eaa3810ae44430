"""A worker's own /health and /metrics."""

from __future__ import annotations

import json
import secrets
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from voltapile.shm.board import Board
from voltapile.topology.plan import RankPlan
from voltapile.workers import status as module
from voltapile.workers.routing import Routing
from voltapile.workers.status import Status, StatusPort, answer

MINE = RankPlan(
    rank=1, share=None,  # type: ignore[arg-type]
    page_bytes=[], device="cuda:1", node=0, cpus=[], threads=1,
    memory={"weights": 100, "kv": 50, "reserve": 7}, mapped_bytes=0, host={"reserve": 900},
)  # fmt: skip

PLAN: Any = SimpleNamespace(id="abc", ranks=[None, MINE], shared={"token_embd.weight": 30})


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(f"test-{secrets.token_hex(6)}", 2)
    yield board
    board.close()


@pytest.fixture
def status(board: Board) -> Status:
    board.join(1)
    return Status(board, PLAN, 1)


def ask(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (
            sample.name.removeprefix("voltapile_worker_"),
            *sorted(sample.labels.values()),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_health_follows_the_board(board: Board, status: Status) -> None:
    with StatusPort(status) as port:
        code, text = ask(port.port, "/health")
        assert (code, json.loads(text)["status"]) == (503, "loading")
        board.publish(1, "ready", "ready", 1.0)
        code, text = ask(port.port, "/health?x=1")
        told = json.loads(text)
        assert (code, told["status"], told["rank"], told["plan"]) == (200, "ok", 1, "abc")
        board.abort("rank 0 has gone")
        code, text = ask(port.port, "/health")
        assert (code, json.loads(text)["reason"]) == (503, "rank 0 has gone")
        assert ask(port.port, "/nothing")[0] == 404


def test_a_loop_that_stands_still_is_not_healthy(
    board: Board, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    board.publish(1, "ready", "ready", 1.0)
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.0)
    time.sleep(0.01)
    assert status.report()["status"] == "silent"


def test_metrics(board: Board, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "resident_bytes", lambda: 800)
    board.publish(1, "ready", "ready", 1.0)
    status.memory = {"weights": (100, 99), "caches and slots": (60, 59)}
    status.shared_bytes = 29
    for seconds in (0.003, 0.004, 100.0):
        status.step_done(seconds)
    status.look()  # in no step: not counted
    board.wait_for(1, 0)
    status.look()
    board.begin_step(1, 5)
    status.look()
    status.look()
    found = samples(
        answer(status, b"GET /metrics HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")[2].decode()
    )
    assert found["up", "1"] == 1
    assert found["step_seconds_count", "1"] == 3
    assert found["step_seconds_sum", "1"] == pytest.approx(100.007)
    assert found["step_seconds_bucket", "0.005", "1"] == 2
    assert found["step_seconds_bucket", "+Inf", "1"] == 3
    assert found["waited_seconds_total", "0", "1"] == pytest.approx(2 * module.LOOK_SECONDS)
    assert found["memory_bytes", "1", "used", "vram", "weights"] == 99
    assert found["memory_bytes", "1", "planned", "reserve", "vram"] == 7
    assert found["memory_bytes", "1", "host", "planned", "process"] == 900
    assert found["memory_bytes", "1", "host", "process", "used"] == 800
    assert found["memory_bytes", "1", "host", "planned", "shared"] == 30
    assert found["memory_bytes", "1", "host", "shared", "used"] == 29
    assert not any("expert" in name for name, *_ in found), "there are none"


def test_metrics_of_experts(status: Status) -> None:
    status.routing = Routing({5: np.zeros((2, 8), np.int64)})
    status.routing.take([5], [np.array([[1] * 8, [3, 0, 1, 0, 0, 0, 0, 0]])])
    found = samples(status.metrics())
    assert found["expert_choices_total", "1", "decode"] == 4
    assert found["expert_busiest_share", "1", "5", "prompt"] == 0.125
    assert found["expert_busiest_share", "1", "5", "decode"] == 0.75


@pytest.mark.parametrize(
    ("question", "code"),
    [(b"POST /health HTTP/1.1\r\n\r\n", b"405"), (b"\r\n\r\n", b"405"), (b"GET\r\n\r\n", b"405"),
     (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"503")],
)  # fmt: skip
def test_questions(status: Status, question: bytes, code: bytes) -> None:
    assert answer(status, question).split()[1] == code


def test_a_client_that_says_nothing_holds_up_nobody(
    status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLIENT_SECONDS", 0.05)
    with StatusPort(status) as port, socket.create_connection(("127.0.0.1", port.port)) as silent:
        assert ask(port.port, "/metrics")[0] == 200
        assert silent.recv(10) == b""


def test_a_client_that_says_little_at_a_time_is_not_heard_to_the_end(
    status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLIENT_SECONDS", 0.2)
    with StatusPort(status) as port, socket.create_connection(("127.0.0.1", port.port)) as slow:
        slow.settimeout(0.02)
        for _ in range(100):
            try:
                slow.sendall(b"x")
                assert slow.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                pass
            break
        else:
            pytest.fail("it was listened to all the time")
        assert ask(port.port, "/metrics")[0] == 200


def test_a_port_in_use_is_one_line(status: Status) -> None:
    with (
        StatusPort(status) as port,
        pytest.raises(OSError, match="Address already in use") as caught,
    ):
        StatusPort(status, port.port)
    assert f"--status-port {port.port}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_memory_of_this_process() -> None:
    assert module.resident_bytes() > 1 << 20
