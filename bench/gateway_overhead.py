"""What the gateway itself costs: CPU time a token and time to the first token.

    python bench/gateway_overhead.py -m model.gguf [--tokens 500] [--pace 0 10] [--interval 0 50]
                                     [--json]

A real gateway process (`voltapile gateway`) and a scripted worker process that answers each Step
after --pace milliseconds (0: at once). --interval is the gateway's --stream-interval-ms; at once no
token waits for another. Only the model's vocabulary is used. CPU time is that of all
of the gateway's threads, from /proc, while the streams run; a token's delay is from the worker's
message to the client's read; the first token's time is what the gateway adds when prefill takes no
time at all. The last rows are what this machine asks of anybody: a uvloop program that reads as
many bytes from a socket and writes as many to another (floor.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq
from floor import floor_us
from streaming import Timed, joint_tok_s, stream_completion, together
from voltapile.topology.plan import Plan, from_json
from voltapile.workers.outbox import Outbox
from voltapile.workers.protocol import (
    Hold,
    Ready,
    Result,
    Row,
    Sampled,
    Step,
    Stop,
    decode,
    encode,
)
from voltapile.workers.rounds import Rounds

COMMAND = [
    sys.executable,
    "-c",
    "import sys; from voltapile.gateway.cli.main import main; sys.exit(main(sys.argv[1:]))",
]
PROMPT = 16
LETTERS = range(300, 340)  # ids whose text is ordinary in every vocabulary that we serve


class ScriptedWorker:
    """Answers Steps without a model; every slot says the same."""

    def __init__(self, plan: Plan, pace: float, sent: Path) -> None:
        self.plan, self.pace, self.sent = plan, pace, sent
        self.position: dict[int, int] = {}
        self.limit: dict[int, int] = {}

    def run(self) -> None:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.set(zmq.IDENTITY, b"text-0")
        socket.set(zmq.LINGER, 0)
        socket.connect(self.plan.endpoint)
        ready = Ready(name="text-0", plan=self.plan.id, instance=1)
        socket.send_multipart(encode(ready))
        free_at, rounds, outbox = 0.0, Rounds(), Outbox()
        times = self.sent.open("wb", buffering=0)
        while True:
            while not rounds or socket.poll(0):
                message = decode(socket.recv_multipart())
                if isinstance(message, Stop):
                    return
                if isinstance(message, Hold):
                    rounds.hold(message.step)
                elif isinstance(message, Step):
                    rounds.add(message)
            step = rounds.next()
            free_at = max(free_at, time.perf_counter()) + self.pace
            time.sleep(max(0.0, free_at - time.perf_counter()))
            rows = [self.answer(row) for row in step.rows]
            result = Result(id=step.id, rows=[row for row in rows if row], seconds=self.pace)
            rounds.settle(result)
            for due in outbox.put(result, step):
                when = time.perf_counter()
                socket.send_multipart(encode(due))
                times.write(struct.pack("<d", when))

    def answer(self, row: Row) -> Sampled | None:
        if row.sampling is not None:
            self.position[row.slot] = 0
            self.limit[row.slot] = row.sampling.max_position
        self.position[row.slot] += len(row.tokens)
        at = self.position[row.slot]
        if not row.sample:
            return None
        if at >= self.limit[row.slot]:
            return Sampled(slot=row.slot)
        if not len(row.tokens):
            self.position[row.slot] = at = at + 1
            if at >= self.limit[row.slot]:
                return Sampled(slot=row.slot)
        finish = "length" if at + 1 >= self.limit[row.slot] else ""
        token = LETTERS[at % len(LETTERS)]
        return Sampled(slot=row.slot, tokens=[token], finish=finish)


@contextlib.contextmanager
def running(plan: Path, pace: float, interval: float = 50.0) -> Iterator[tuple[str, int]]:
    """A gateway with its worker; yields (URL, the gateway's process id)."""
    options = ["--plan", str(plan), "--port", "0", "--stream-interval-ms", str(interval)]
    gateway = subprocess.Popen([*COMMAND, "gateway", *options], stderr=subprocess.PIPE, text=True)
    worker = None
    try:
        assert gateway.stderr is not None
        url = ""
        for line in gateway.stderr:
            if match := re.search(r"(http://\S+) listens", line):
                url = match[1]
                sent = plan.with_suffix(".sent")
                worker = subprocess.Popen(
                    [sys.executable, __file__, "--worker", str(plan), str(pace), str(sent)]
                )
            if line.startswith("ready"):
                break
        else:
            raise RuntimeError("the gateway ended")
        yield url, gateway.pid
    finally:
        gateway.terminate()
        gateway.wait(10)
        if worker is not None:
            worker.terminate()
            worker.wait(10)


def cpu_seconds(pid: int) -> float:
    """Of all threads, in nanosecond steps."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def delays(sent: Path, before: int, stream: Timed) -> list[float]:
    """Of a stream that was alone, from its Results to its reads."""
    left = [when for (when,) in struct.iter_unpack("<d", sent.read_bytes()[before:])]
    came = [when for when, events in stream.arrivals for _ in range(events)]
    return [b - a for a, b in zip(left, came, strict=False)]


async def measure(
    url: str, pid: int, sent: Path, streams: int, tokens: int, repeat: int
) -> dict[str, Any]:
    prompt = [LETTERS[0]] * PROMPT
    await together(url, [prompt] * streams, 20)  # warm
    firsts = [(await stream_completion(url, prompt, 2)).first_token_seconds for _ in range(20)]
    costs, rates, late = [], [], []
    for _ in range(repeat):
        await asyncio.sleep(0.05)  # what was in flight for those that have ended is done
        before, size = cpu_seconds(pid), sent.stat().st_size
        done = await together(url, [prompt] * streams, tokens)
        made = sum(stream.tokens for stream in done)
        assert made == streams * tokens, made
        costs.append((cpu_seconds(pid) - before) / made * 1e6)
        rates.append(joint_tok_s(done))
        if streams == 1:
            late += delays(sent, size, done[0])
    return {
        "streams": streams,
        "cpu_us_per_token": round(statistics.median(costs), 1),
        "all_cpu_us": [round(cost, 1) for cost in costs],
        "delay_us": round(statistics.median(late) * 1e6) if late else "",
        "tok_s": round(statistics.median(rates), 1),
        "us_per_token": round(1e6 / statistics.median(rates), 1),
        "first_token_ms": round(statistics.median(firsts) * 1000, 2),
        "worst_first_token_ms": round(max(firsts) * 1000, 2),
    }


def measure_all(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        options = ["-m", args.model, "-np", str(max(args.streams)), "-c", "2048"]
        command = [*COMMAND, "plan", *options, "--backend", "reference", "--json"]
        plan.write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        runs = [(pace, wait) for pace in args.pace for wait in (args.interval if pace else [0.0])]
        for pace, interval in runs:
            tokens = args.tokens if not pace else min(args.tokens, int(5000 / pace))
            with running(plan, pace / 1000, interval) as (url, pid):
                for streams in args.streams:
                    measured = measure(
                        url, pid, plan.with_suffix(".sent"), streams, tokens, args.repeat
                    )
                    yield {"pace_ms": pace, "interval_ms": interval} | asyncio.run(measured)
    for pace in filter(None, args.pace):
        costs = [floor_us(pace / 1000, min(args.tokens, int(5000 / pace))) for _ in range(3)]
        yield {"pace_ms": pace, "streams": "floor", "cpu_us_per_token": statistics.median(costs)}


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        plan_path, pace, sent = sys.argv[2:]
        plan = from_json(Path(plan_path).read_bytes())
        ScriptedWorker(plan, float(pace), Path(sent)).run()
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--pace", type=float, nargs="+", default=[0.0, 10.0], help="ms a Step")
    parser.add_argument("--interval", type=float, nargs="+", default=[0.0, 50.0], help="ms")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = list(measure_all(args))
    if args.json:
        print(json.dumps(rows))
        return 0
    titles = {
        "pace_ms": "ms a step", "interval_ms": "interval ms", "streams": "streams",
        "cpu_us_per_token": "CPU us a token", "delay_us": "delay us", "tok_s": "tok/s",
        "us_per_token": "us a token", "first_token_ms": "first token ms",
        "worst_first_token_ms": "worst",
    }  # fmt: skip
    print("| " + " | ".join(titles.values()) + " |\n" + "|---" * len(titles) + "|")
    for row in rows:
        print("| " + " | ".join(str(row.get(key, "")) for key in titles) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
