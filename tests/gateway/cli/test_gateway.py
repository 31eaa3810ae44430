"""voltapile gateway beside what other servers and crashes have left."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from voltapile.topology.plan import Plan, to_json

SECONDS = 30.0
COMMAND = [sys.executable, "-m", "voltapile.gateway.cli.main"]


@pytest.fixture
def plan(mini: Path, tmp_path: Path, plan_for: Callable[..., Plan]) -> Path:
    path = tmp_path / "plan.json"
    endpoint = f"ipc://{tmp_path}/s.sock"
    found = plan_for(mini / "llama/model-f16.gguf", "cpu", endpoint=endpoint, context=128)
    path.write_bytes(to_json(found))
    return path


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def make(*argv: str, **options: Any) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen([*COMMAND, *argv], stderr=subprocess.PIPE, text=True, **options)
        )
        return started[-1]

    yield make
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    for process in started:
        process.communicate(timeout=SECONDS)


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """The first line with it."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return line
    pytest.fail(f"ended without {text!r}: {process.wait(SECONDS)}")


def test_two_servers_with_one_plan(start: Callable[..., Any], plan: Path) -> None:
    argv = ["gateway", "--plan", str(plan), "--port", "0"]
    wait_for(start(*argv), "loading: ")
    second = start(*argv)
    _, err = second.communicate(timeout=SECONDS)
    assert second.returncode == 1
    assert err.splitlines()[-1].startswith("voltapile: another gateway listens at ipc://")


def test_a_socket_that_a_crash_has_left(start: Callable[..., Any], plan: Path) -> None:
    """Also the Board: its owner was killed."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(plan.parent / "s.sock"))
    first = start("gateway", "--plan", str(plan), "--port", "0")
    wait_for(first, "loading: ")
    first.kill()
    first.wait(SECONDS)
    assert (plan.parent / "s.sock").exists()
    second = start("gateway", "--plan", str(plan), "--port", "0")
    worker = start("worker", "--plan", str(plan))
    wait_for(second, "ready")
    assert worker.poll() is None


def test_little_locked_memory_and_no_libnuma(start: Callable[..., Any], plan: Path) -> None:
    """`ulimit -l 64`, and a worker that cannot place memory: it goes on, and says so once."""
    hidden = plan.parent / "hidden"
    hidden.mkdir()
    (hidden / "numa.py").write_text("raise OSError('libnuma.so.1: no such file')\n")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))

    gateway = start("gateway", "--plan", str(plan), "--port", "0")
    environment = {**os.environ, "PYTHONPATH": str(hidden)}
    worker = start("worker", "--plan", str(plan), preexec_fn=limit, env=environment)
    wait_for(gateway, "ready")
    time.sleep(0.1)
    worker.send_signal(signal.SIGTERM)
    _, err = worker.communicate(timeout=SECONDS)
    assert err.count("libnuma is missing (libnuma.so.1: no such file): install libnuma1") == 1
