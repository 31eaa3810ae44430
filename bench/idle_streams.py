"""What open streams cost the gateway while nothing comes: resident memory, and time of its threads.

    python bench/idle_streams.py -m model.gguf [--streams 500] [--seconds 20] [--json]

A real gateway, and a scripted worker that takes each Step and answers none for an hour. Every
client has sent a chat with tools, has got its headers, and waits; keep-alive comments go out
meanwhile. Only the model's vocabulary and template are used. The bound: at most 100 MB for 500
streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from footprint import resident
from gateway_overhead import COMMAND, cpu_seconds, running

PACE = 3600.0  # seconds of a Step
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a place.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


def request(where: str, number: int) -> bytes:
    text = f"Question {number}: " + "what is the capital of France, and why? " * 20
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": text}],
            "tools": [TOOL],
            "stream": True,
            "max_tokens": 100,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {where}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def opened(url: str, number: int) -> asyncio.StreamWriter:
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(request(where.netloc, number))
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0], head
    return writer


def held(pid: int) -> int:
    """Bytes that are the process's own; mapped files are not."""
    return resident(pid)["anonymous"]


async def measure(url: str, pid: int, streams: int, seconds: float) -> dict[str, float]:
    first = await opened(url, -1)  # whatever is made once
    await asyncio.sleep(1)
    before = held(pid)
    writers = [await opened(url, number) for number in range(streams)]
    await asyncio.sleep(1)
    opened_bytes, began = held(pid) - before, cpu_seconds(pid)
    await asyncio.sleep(seconds)
    busy, after = cpu_seconds(pid) - began, held(pid) - before
    for writer in (first, *writers):
        writer.close()
    return {
        "streams": streams,
        "before_mb": round(before / 1e6, 1),
        "opened_mb": round(opened_bytes / 1e6, 1),
        "later_mb": round(after / 1e6, 1),
        "kb_a_stream": round(after / streams / 1e3, 1),
        "cpu_percent": round(100 * busy / seconds, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        options = ["-m", args.model, "-np", "32", "-c", "2048", "--backend", "reference"]
        done = subprocess.run([*COMMAND, "plan", *options, "--json"], check=True,
                              stdout=subprocess.PIPE)  # fmt: skip
        plan.write_bytes(done.stdout)
        with running(plan, PACE) as (url, pid):
            row = asyncio.run(measure(url, pid, args.streams, args.seconds))
    if args.json:
        print(json.dumps(row))
        return 0
    print("| " + " | ".join(row) + " |\n" + "|---" * len(row) + "|")
    print("| " + " | ".join(map(str, row.values())) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
