"""The units for bare metal: systemd accepts them, and their very command lines serve a model."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "systemd"
PROGRAM = "/usr/local/bin/voltapile"
SECONDS = 60.0


def settings(unit: str, name: str) -> list[str]:
    lines = (UNITS / unit).read_text().splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{name}=")]


def options() -> dict[str, str]:
    lines = (UNITS / "options").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def command(line: str, specifiers: dict[str, str], environment: dict[str, str]) -> list[str]:
    """As systemd makes it: ${NAME} is one word, $NAME as many as there are in it."""
    words: list[str] = []
    for word in shlex.split(line):
        for specifier, value in specifiers.items():
            word = word.replace(f"%{specifier}", value)
        if word.startswith("$") and not word.startswith("${"):
            words += shlex.split(environment[word[1:]])
            continue
        for name, value in environment.items():
            word = word.replace(f"${{{name}}}", value)
        words.append(word)
    assert words[0] == PROGRAM
    return [sys.executable, "-m", "voltapile.gateway.cli.main", *words[1:]]


@pytest.fixture
def install(tmp_path: Path) -> Path:
    """The units, with a program that is there."""
    program = shutil.which("true")
    assert program
    for path in UNITS.iterdir():
        text = path.read_text().replace(PROGRAM, program)
        (tmp_path / path.name).write_text(text)
    return tmp_path


def test_systemd_accepts_them(install: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here: apt-get install systemd")
    instance = install / "voltapile-worker@0.service"
    shutil.copy(install / "voltapile-worker@.service", instance)
    units = [path for path in sorted(install.iterdir()) if path.suffix in (".service", ".target")]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, units)],
        capture_output=True,
        text=True,
        check=False,
        env={"SYSTEMD_UNIT_PATH": f"{install}:", "PATH": "/usr/bin:/bin"},
        timeout=60,
    )
    told = [line for line in done.stderr.splitlines() if "voltapile" in line]
    assert (done.returncode, told) == (0, []), done.stderr


def test_a_unit_with_a_mistake_is_not_accepted(install: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here: apt-get install systemd")
    path = install / "voltapile-plan.service"
    path.write_text(path.read_text().replace("Type=oneshot", "Typ=oneshot"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert "Typ" in done.stderr


def test_what_the_units_promise() -> None:
    worker = "voltapile-worker@.service"
    assert settings(worker, "Type") == ["notify"]
    assert settings(worker, "LimitMEMLOCK") == ["infinity"]
    for unit in (worker, "voltapile-gateway.service"):
        assert settings(unit, "WatchdogSec")
        assert settings(unit, "Requires") == ["voltapile-plan.service"]
    assert settings("voltapile-plan.service", "Type") == ["oneshot"]
    used = {
        word.strip("${}")
        for path in UNITS.glob("*.service")
        for line in settings(path.name, "ExecStart")
        for word in shlex.split(line)
        if word.startswith("$")
    }
    assert used == {*options(), "NOTIFY_SOCKET"}


class Service:
    """A process, and what it tells systemd."""

    def __init__(
        self, name: str, line: str, rank: int, folder: Path, chosen: dict[str, str]
    ) -> None:
        self.name, self.heard = name, ""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = str(folder / f"{name}.notify")
        self.socket.bind(address)
        specifiers = {"t": str(folder), "i": str(rank)}
        argv = command(line, specifiers, {**chosen, "NOTIFY_SOCKET": address})
        self.process = subprocess.Popen(argv)

    def wait_for(self, found: Callable[[str], bool], seconds: float = SECONDS) -> str:
        """All that was heard, once that is as it should be."""
        end = time.monotonic() + seconds
        while not found(self.heard):
            self.socket.settimeout(max(0.01, end - time.monotonic()))
            try:
                self.heard += self.socket.recv(4096).decode() + "\n"
            except TimeoutError:
                pytest.fail(f"{self.name}: heard {self.heard!r}")
            assert self.process.poll() is None, f"{self.name} has ended: {self.heard}"
        return self.heard

    def close(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self.socket.close()


@pytest.fixture
def services() -> Iterator[list[Service]]:
    started: list[Service] = []
    yield started
    for service in started:
        service.close()


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_command_lines_serve(services: list[Service], tmp_path: Path, mini: Path) -> None:
    """Two ranks and a gateway: each says that it is ready, and its loop that it goes round."""
    (tmp_path / "voltapile").mkdir()  # RuntimeDirectory
    chosen = options() | {
        "VOLTAPILE_MODEL": str(mini / "llama/model-f16.gguf"),
        "VOLTAPILE_PLAN": "--device cpu --ranks 2 -t 2 -c 128",
        "VOLTAPILE_PORT": "0",
        "VOLTAPILE_WORKER": "--status-port 0",
    }
    for line in settings("voltapile-plan.service", "ExecStart"):
        subprocess.run(command(line, {"t": str(tmp_path)}, chosen), check=True, timeout=SECONDS)
    (line,) = settings("voltapile-worker@.service", "ExecStart")
    for rank in range(2):
        services.append(Service(f"worker-{rank}", line, rank, tmp_path, chosen))
    (line,) = settings("voltapile-gateway.service", "ExecStart")
    services.append(Service("gateway", line, 0, tmp_path, chosen))
    for service in services:
        service.wait_for(lambda heard: "READY=1" in heard)
        before = service.heard.count("WATCHDOG=1")
        service.wait_for(lambda heard, n=before: heard.count("WATCHDOG=1") >= n + 2)  # type: ignore[misc]
    heard = services[-1].heard
    url = next(word for word in heard.split() if word.startswith("STATUS=http")).partition("=")[2]
    end = time.monotonic() + SECONDS
    while get(f"{url}/health")[0] != 200:
        assert time.monotonic() < end, get(f"{url}/health")
        time.sleep(0.1)
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    ask = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(ask, timeout=30) as response:
        assert json.loads(response.read())["usage"]["completion_tokens"] == 4
    metrics = get(f"{url}/metrics")[1]
    for rank in range(2):
        assert f'voltapile_worker_up{{rank="{rank}"}} 1.0' in metrics
        assert f'voltapile_worker_step_seconds_count{{rank="{rank}"}} 0\n' not in metrics
    assert metrics.count("# TYPE voltapile_worker_up gauge") == 1
    for service in services[::-1]:
        with contextlib.suppress(ProcessLookupError):
            service.process.send_signal(signal.SIGTERM)
        # Workers end with the gateway, and may be past handling signals; systemd calls both clean.
        assert service.process.wait(15) in (0, -signal.SIGTERM), service.name


def test_a_plan_that_does_not_fit_fails_loudly(tmp_path: Path, mini: Path) -> None:
    (tmp_path / "voltapile").mkdir()
    chosen = options() | {
        "VOLTAPILE_MODEL": str(mini / "llama/model-f16.gguf"),
        "VOLTAPILE_PLAN": "--device cpu -c 1000000000",
    }
    probe, plan = settings("voltapile-plan.service", "ExecStart")
    specifiers = {"t": str(tmp_path)}
    subprocess.run(command(probe, specifiers, chosen), check=True, timeout=SECONDS)
    done = subprocess.run(
        command(plan, specifiers, chosen), capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "voltapile: " in done.stderr
    assert not (tmp_path / "voltapile/plan.json").exists()
