"""`voltapile serve` on a GPU as people run it: it is taken by itself, answers as the goldens do,
loses a worker without losing a token, and ends when it is told to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MODELS = ("llama", "qwen2", "qwen3", "gemma3")
TIE = 1e-3  # margin of a golden's greedy token under which another may win
PATIENCE = 120.0
END_SECONDS = 10.0  # other tests may use the GPU, and every core, at the same time


class Server:
    """A server and what it says on standard error."""

    def __init__(self, model: Path, log: Path, *options: str) -> None:
        command = [sys.executable, "-m", "voltapile.gateway.cli.main", "serve", "-m", str(model)]
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, "-c", "512", "--port", "0", *options],
                stdout=subprocess.DEVNULL,
                stderr=file,
            )
        deadline = time.monotonic() + PATIENCE
        while "\nready\n" not in self.said:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)
        self.url = next(line.split()[0] for line in self.said.split("\n") if " listens" in line)

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def worker(self) -> int:
        """The first of them; beside it lives the renderer of chat templates."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        commands = {int(each): Path(f"/proc/{each}/cmdline").read_bytes() for each in children}
        return next(pid for pid, command in commands.items() if b"voltapile.workers" in command)

    def wait(self) -> None:
        """Until it answers again."""
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(self.url + "/health", timeout=PATIENCE).close()
                return
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def ask(self, path: str, **body: Any) -> Any:
        with self.open(path, **body) as answer:
            return json.load(answer)

    def open(self, path: str, **body: Any) -> Any:
        return urllib.request.urlopen(self.url + path, json.dumps(body).encode(), timeout=PATIENCE)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        answer = self.ask(
            "/v1/completions", prompt=prompt, max_tokens=count, temperature=0, ignore_eos=True,
            return_tokens=True,
        )  # fmt: skip
        return list(answer["choices"][0]["tokens"])


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """serve(model, options ...) -> a Server that is ready. On a GPU alone."""
    pytest.importorskip("cupy")
    from voltapile.kernels.cuda.device import device_count

    if not device_count():
        pytest.skip("no GPU here")
    with contextlib.ExitStack() as stack:

        def start(model: Path, *options: str) -> Server:
            server = Server(model, tmp_path / "log", *options)
            stack.callback(server.process.wait, END_SECONDS)
            stack.callback(server.process.kill)
            return server

        yield start


@pytest.mark.parametrize("model", MODELS)
def test_it_answers_as_the_goldens_do(mini: Path, serve: Callable[..., Server], model: str) -> None:
    server = serve(mini / model / "model-f16.gguf")
    assert " on cuda, " in server.said
    prompts = json.loads((mini / model / "golden.json").read_text())["prompts"]
    stored = np.load(mini / model / "golden.npz")
    for name, ids in prompts.items():
        greedy, margins = stored[f"{name}.greedy"], stored[f"{name}.greedy_margin"]
        near_ties = np.flatnonzero(margins < TIE)
        end = int(near_ties[0]) if len(near_ties) else len(greedy)
        assert server.greedy(ids, len(greedy))[:end] == greedy[:end].tolist(), name


def test_the_gpu_is_kept_out(mini: Path, serve: Callable[..., Server]) -> None:
    pytest.importorskip("voltapile.kernels.cpu._cpu")
    assert " on cpu, " in serve(mini / "llama/model-f16.gguf", "-ngl", "0", "-t", "2").said


def test_a_lost_worker_and_the_end(mini: Path, serve: Callable[..., Server]) -> None:
    server = serve(mini / "qwen3/model-f16.gguf")
    messages = [{"role": "user", "content": "hello"}]
    answer = server.ask("/v1/chat/completions", messages=messages, max_tokens=5, temperature=0)
    assert answer["usage"]["completion_tokens"] == 5
    body = {"prompt": [40, 50, 60], "ignore_eos": True, "return_tokens": True, "seed": 7}
    whole = server.ask("/v1/completions", **body, max_tokens=40)["choices"][0]["tokens"]
    tokens: list[int] = []
    with server.open("/v1/completions", **body, max_tokens=400, stream=True) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                if not tokens:
                    os.kill(server.worker, signal.SIGKILL)
                tokens += json.loads(line[6:])["choices"][0].get("tokens", [])
    assert len(tokens) == 400
    assert tokens[:40] == whole
    server.wait()
    worker = server.worker
    with server.open("/v1/completions", **body, max_tokens=400, stream=True) as stream:
        assert stream.readline().startswith(b"data:")
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert "error" in stream.read().decode()
    assert server.process.wait(END_SECONDS) == 0
    assert time.monotonic() - began < END_SECONDS
    assert not Path(f"/proc/{worker}").exists()
