"""What `voltapile serve` takes: seconds to ready, and resident memory of its processes.

    .venv/bin/python bench/footprint.py -m models/SmolLM2-135M-Instruct.Q4_1.gguf

Prints one JSON object. Resident memory is read after a prompt that fills a batch and an answer:
`anonymous` is what the process holds for itself, `file` the mapped model and libraries. Bounds: the
worker at most mapped file + KV + 300 MB, the gateway at most 200 MB, with its renderer of chat
templates.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PATIENCE = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def call(url: str, body: dict[str, Any] | None = None) -> bytes:
    data = json.dumps(body).encode() if body is not None else None
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=PATIENCE) as answer:
        return bytes(answer.read())


def seconds_to_ready(url: str, began: float) -> float:
    while time.monotonic() - began < PATIENCE:
        try:
            call(f"{url}/health")
            return time.monotonic() - began
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.02)
    raise SystemExit("the server did not become ready")


def resident(pid: int) -> dict[str, int]:
    """Bytes by kind, from /proc."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kinds = {"RssAnon": "anonymous", "RssFile": "file", "RssShmem": "shared", "VmHWM": "peak"}
    pairs = (line.split(":") for line in lines)
    return {kinds[key]: int(value.split()[0]) * 1024 for key, value in pairs if key in kinds}


def children(pid: int, module: bytes) -> list[int]:
    """The processes that `pid` has started to run a Python module."""
    pids = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [each for each in pids if module in Path(f"/proc/{each}/cmdline").read_bytes()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    args, extra = parser.parse_known_args()
    port = free_port()
    command = [sys.executable, "-m", "voltapile.gateway.cli.main", "serve", "-m", args.model]
    began = time.monotonic()
    server = subprocess.Popen(
        [*command, "--port", str(port), *extra],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        ready = seconds_to_ready(url, began)
        prompt = [300 + (37 * i) % 400 for i in range(args.prompt)]
        body = {"prompt": prompt, "max_tokens": 64, "ignore_eos": True}
        call(f"{url}/v1/completions", body)
        figures = {
            "ready_s": round(ready, 2),
            "gateway": resident(server.pid),
            "renderer": [resident(pid) for pid in children(server.pid, b"gateway.sandbox")],
            "workers": [resident(pid) for pid in children(server.pid, b"voltapile.workers")],
            "model_bytes": Path(args.model).stat().st_size,
        }
        print(json.dumps(figures))
    finally:
        server.terminate()
        server.wait(timeout=20)


if __name__ == "__main__":
    main()
