"""`voltapile serve` and `voltapile gateway` as people run them: signals, exit codes, what is left.

Most tests put a fake worker in the real one's place; the last ones run everything.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from voltapile.gateway.cli.serve import api_keys, milliseconds, port
from voltapile.topology.plan import Plan, to_json

FAKE = Path(__file__).with_name("fake_worker.py")
COMMAND = "import sys; from voltapile.gateway.cli.main import main; sys.exit(main(sys.argv[1:]))"
WITH_FAKE = f"""
import sys
from voltapile.gateway import supervisor
from voltapile.gateway.cli.main import main
split = sys.argv.index("--")
options = sys.argv[split + 1 :]
supervisor.worker_command = lambda path, rank: [sys.executable, {str(FAKE)!r}, str(path), *options]
sys.exit(main(sys.argv[1:split]))
"""


class Running:
    """A program and what it says on standard error."""

    def __init__(self, code: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.said: list[str] = []
        self.is_heard = True  # False: the pipe closes after the next line
        self._seen = 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.said.append(line)
                if not self.is_heard:
                    return

    def until(self, pattern: str, seconds: float = 30.0) -> re.Match[str]:
        """Wait for the next line with `pattern`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (self._reader.is_alive() or self._has_more()):
            while self._has_more():
                self._seen += 1
                if match := re.search(pattern, self.said[self._seen - 1]):
                    return match
            time.sleep(0.005)
        raise AssertionError(f"no {pattern!r} in {''.join(self.said)}")

    def _has_more(self) -> bool:
        return self._seen < len(self.said)

    def signal(self, number: signal.Signals) -> float:
        self.process.send_signal(number)
        return time.monotonic()

    def wait(self, seconds: float = 10.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code


Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    programs: list[Running] = []

    def begin(*arguments: str) -> Running:
        programs.append(Running(*arguments))
        return programs[-1]

    yield begin
    for program in programs:
        if program.process.poll() is None:
            program.process.kill()
        program.wait()


@pytest.fixture
def serve(start: Start, mini: Path) -> Callable[..., Running]:
    """serve(worker options ...): `voltapile serve` over a fake worker."""
    model = str(mini / "llama/model-f16.gguf")
    return lambda *options, port="0": start(
        WITH_FAKE, "serve", "-m", model, "-c", "512", "--backend", "reference",
        "--port", port, "--", *options,
    )  # fmt: skip


def url_of(program: Running) -> str:
    return program.until(r"(http://\S+) listens")[1]


def ask(url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(url, data, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def workers(pid: int) -> list[int]:
    """All that it has started but the renderer of its chat template."""
    pids = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [p for p in pids if b"gateway.sandbox" not in Path(f"/proc/{p}/cmdline").read_bytes()]


def mine(program: Running) -> set[str]:
    """Names of the files that a server made: its plan, its socket, its Board."""
    [worker] = workers(program.process.pid)
    command = Path(f"/proc/{worker}/cmdline").read_text().split("\0")
    path = next(Path(word) for word in command if word.endswith(".json"))
    plan = json.loads(path.read_text())
    return {
        str(path),
        plan["endpoint"].removeprefix("ipc://"),
        f"/dev/shm/voltapile-{plan['id']}-board",
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_and_a_signal_ends_it_cleanly(
    serve: Callable[..., Running], number: signal.Signals
) -> None:
    program = serve("--step-seconds", "0.02")
    url = url_of(program)
    program.until("^ready")
    program.until(f"^curl -s {url}/v1/chat/completions")
    status, answer = ask(f"{url}/v1/completions", {"prompt": [1], "max_tokens": 5})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
    made = mine(program)
    assert all(os.path.exists(name) for name in made)
    body = json.dumps({"prompt": [1], "max_tokens": 400, "stream": True, "ignore_eos": True})
    with urllib.request.urlopen(f"{url}/v1/completions", body.encode(), timeout=20) as stream:
        assert stream.readline().startswith(b"data:")
        began = program.signal(number)
        rest = stream.read().decode()
    assert "error" in rest
    assert program.wait() == 0
    assert time.monotonic() - began < 3.5
    assert not any(os.path.exists(name) for name in made)


def test_a_second_signal_does_not_wait(serve: Callable[..., Running]) -> None:
    program = serve()
    program.until("^ready")
    made = mine(program)
    [worker] = workers(program.process.pid)
    os.kill(worker, signal.SIGSTOP)
    program.signal(signal.SIGINT)
    program.until("stopping")
    began = program.signal(signal.SIGINT)
    assert program.wait() == 130
    assert time.monotonic() - began < 0.5
    assert not any(os.path.exists(name) for name in made)
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, 0)
        assert Path(f"/proc/{worker}/stat").read_text().split()[2] == "Z"


def test_a_signal_while_loading(serve: Callable[..., Running]) -> None:
    program = serve("--load-seconds", "30")
    url = url_of(program)
    program.until("loading: weights 50%")
    assert ask(f"{url}/health")[0] == 503
    assert ask(f"{url}/v1/completions", {"prompt": [1]})[0] == 503
    began = program.signal(signal.SIGTERM)
    assert program.wait() == 0
    assert time.monotonic() - began < 3.5


def test_it_serves_on_when_nobody_reads_what_it_says(serve: Callable[..., Running]) -> None:
    program = serve("--load-seconds", "1")
    url = url_of(program)
    program.is_heard = False
    deadline = time.monotonic() + 20
    while ask(f"{url}/health")[0] != 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ask(f"{url}/v1/completions", {"prompt": [1], "max_tokens": 2})[0] == 200
    assert "ready\n" not in program.said


def test_what_cannot_be_loaded_is_one_line_and_exit_code_1(serve: Callable[..., Running]) -> None:
    program = serve("--fail", "the file is bad")
    assert program.wait(30) == 1
    assert program.said[-1] == "voltapile: the file is bad\n"


def test_a_port_in_use_is_found_before_loading(serve: Callable[..., Running]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        program = serve(port=str(taken.getsockname()[1]))
        assert program.wait(30) == 1
    assert "in use" in program.said[-1]
    assert "loading" not in "".join(program.said)


def test_the_gateway_finds_a_worker_that_someone_else_starts(
    start: Start, mini: Path, tmp_path: Path, plan_for: Callable[..., Plan]
) -> None:
    plan = plan_for(mini / "llama/model-f16.gguf", endpoint=f"ipc://{tmp_path}/socket")
    path = tmp_path / "p.json"
    path.write_bytes(to_json(plan))
    gateway = start(COMMAND, "gateway", "--plan", str(path), "--port", "0")
    url = url_of(gateway)
    assert ask(f"{url}/health")[0] == 503
    worker = start(COMMAND, "worker", "--plan", str(path))
    gateway.until("^ready")
    body = {"prompt": [1], "max_tokens": 5, "ignore_eos": True, "return_tokens": True, "seed": 7}
    first = ask(f"{url}/v1/completions", body)
    worker.signal(signal.SIGKILL)
    worker.wait()
    second = start(COMMAND, "worker", "--plan", str(path))
    deadline = time.monotonic() + 20
    while (again := ask(f"{url}/v1/completions", body))[0] == 503:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert first[0] == again[0] == 200
    assert first[1]["choices"] == again[1]["choices"]
    gateway.signal(signal.SIGTERM)
    assert gateway.wait() == 0
    assert second.wait() == 0, "the gateway tells its workers to end"


@pytest.mark.parametrize("how", [["--backend", "reference"], ["--ranks", "3", "--device", "cpu"]])
def test_all_of_it_with_real_workers(start: Start, mini: Path, how: list[str]) -> None:
    model = str(mini / "llama/model-f16.gguf")
    program = start(
        COMMAND, "serve", "-m", model, "-c", "512", "--port", "0", "--api-key", "one,two", *how
    )
    url = url_of(program)
    program.until("^ready")
    assert ask(f"{url}/health")[0] == 200
    assert ask(f"{url}/v1/models")[0] == 401
    body = {
        "prompt": "hello",
        "max_tokens": 40,
        "ignore_eos": True,
        "return_tokens": True,
        "seed": 7,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Authorization": "Bearer two"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        whole = json.load(answer)["choices"][0]
    request.full_url, request.data = f"{url}/v1/embeddings", b'{"input": ["a", "bc"]}'
    with urllib.request.urlopen(request, timeout=20) as answer:
        vectors = [each["embedding"] for each in json.load(answer)["data"]]
    assert [sum(x * x for x in vector) for vector in vectors] == pytest.approx([1, 1])
    request.full_url = f"{url}/v1/completions"
    request.data = json.dumps({**body, "max_tokens": 400, "stream": True}).encode()
    tokens: list[int] = []
    with urllib.request.urlopen(request, timeout=20) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                if not tokens:  # one worker less, and nobody notices
                    os.kill(workers(program.process.pid)[-1], signal.SIGKILL)
                tokens += json.loads(line[6:])["choices"][0].get("tokens", [])
    assert len(tokens) == 400
    assert tokens[:40] == whole["tokens"]
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": "Bearer one"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        memory = [line for line in answer if line.startswith(b"voltapile_memory_bytes{")]
    ranks = int(how[1]) if "--ranks" in how else 1
    assert {line.split(b'rank="')[1][:1].decode() for line in memory} == set("0123"[:ranks])
    program.signal(signal.SIGINT)
    assert program.wait() == 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_workers_lost_at_any_moment_lose_no_token(start: Start, mini: Path) -> None:
    """Also while Results wait in them for the next ones, as they do with the default interval."""
    model = str(mini / "llama/model-f16.gguf")
    program = start(COMMAND, "serve", "-m", model, "-c", "512", "--port", "0", "--device", "cpu")
    url = url_of(program)
    program.until("^ready")
    body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "return_tokens": True,
            "seed": 7, "temperature": 1.0, "logprobs": 1}  # fmt: skip
    _, answer = ask(f"{url}/v1/completions", body)
    [whole] = answer["choices"]
    rng = random.Random(5)
    for number in [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM] * 3:
        fatal = rng.randrange(350)
        tokens: list[int] = []
        logprobs: list[float] = []
        data = json.dumps(body | {"stream": True}).encode()
        with urllib.request.urlopen(f"{url}/v1/completions", data, timeout=30) as stream:
            for line in stream:
                if not line.startswith(b"data: {"):
                    continue
                [choice] = json.loads(line[6:])["choices"]
                tokens += choice["tokens"]
                logprobs += choice.get("logprobs", {}).get("token_logprobs", [])
                if len(tokens) > fatal and not choice["finish_reason"]:
                    time.sleep(rng.random() / 50)
                    os.kill(workers(program.process.pid)[-1], number)
                    fatal = 1000
        assert tokens == whole["tokens"]
        assert logprobs == whole["logprobs"]["token_logprobs"]
        until_ready(url)
    program.signal(signal.SIGINT)
    assert program.wait() == 0


def until_ready(url: str) -> None:
    deadline = time.monotonic() + 30
    while ask(f"{url}/health")[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_port_is_a_port() -> None:
    assert [port("0"), port("65535")] == [0, 65535]
    for wrong in ("70000", "-1", "http"):
        with pytest.raises(ValueError, match=wrong):
            port(wrong)


def test_api_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("c\n\n d \n")
    args = argparse.Namespace(api_key=["a,b", ""], api_key_file=path)
    assert api_keys(args) == ["a", "b", "c", "d"]


def test_a_gap_is_a_number_from_0() -> None:
    assert [milliseconds(text) for text in ("0", "2.5", "inf")] == [0.0, 2.5, float("inf")]
    for text in ("-1", "nan", "x"):
        with pytest.raises(ValueError, match=text):
            milliseconds(text)
