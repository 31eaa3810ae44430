"""What a token costs any Python server on this machine: a message in, a chunk out, then a pause.

    python bench/floor.py [--pace 10] [--count 300]

A uvloop program reads 34 bytes from a Unix socket and writes 200 to a TCP connection, and does
nothing else. Its CPU time is that of the wake-up, of cold caches and of the kernel's way to the
client; whoever costs less than that has merged tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
import tempfile
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

MESSAGE, CHUNK = b"x" * 34, b"y" * 200


def cpu_seconds() -> float:
    """Of this process's main thread, in nanosecond steps."""
    return int(Path("/proc/self/schedstat").read_text().split()[0]) / 1e9


class _Forward(asyncio.Protocol):
    def __init__(self, out: asyncio.Transport, ended: asyncio.Event) -> None:
        self.out, self.ended = out, ended

    def data_received(self, data: bytes) -> None:
        self.out.write(CHUNK)

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set()


async def _serve(inward: socket.socket, outward: socket.socket) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    out, _ = await loop.connect_accepted_socket(asyncio.Protocol, outward)
    await loop.connect_accepted_socket(lambda: _Forward(out, ended), inward)
    await ended.wait()


def _program(path: str, port: int, result: Any) -> None:
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    inward = socket.socket(socket.AF_UNIX)
    inward.connect(path)
    outward = socket.create_connection(("127.0.0.1", port))
    before = cpu_seconds()
    asyncio.run(_serve(inward, outward))
    result.send(cpu_seconds() - before)


def _drain(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def floor_us(pace: float, count: int) -> float:
    """CPU microseconds a message, `pace` seconds apart."""
    with tempfile.TemporaryDirectory() as folder:
        inward, outward = socket.socket(socket.AF_UNIX), socket.create_server(("127.0.0.1", 0))
        inward.bind(f"{folder}/s")
        inward.listen()
        context = get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        port = outward.getsockname()[1]
        program = context.Process(target=_program, args=(f"{folder}/s", port, theirs))
        program.start()
        sending, reading = inward.accept()[0], outward.accept()[0]
        threading.Thread(target=_drain, args=(reading,), daemon=True).start()
        time.sleep(0.2)
        for _ in range(count):
            sending.sendall(MESSAGE)
            time.sleep(pace)
        sending.close()
        seconds = float(ours.recv())
        program.join()
        for each in (inward, outward, reading):
            each.close()
    return round(seconds / count * 1e6, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pace", type=float, default=10.0, help="ms between two messages")
    parser.add_argument("--count", type=int, default=300)
    args = parser.parse_args()
    print(f"{floor_us(args.pace / 1000, args.count)} us a message")
    return 0


if __name__ == "__main__":
    sys.exit(main())
