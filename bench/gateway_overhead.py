"""What the gateway itself costs: CPU time a token and time to the first token.

    python bench/gateway_overhead.py -m model.gguf [--tokens 500] [--pace 0 10] [--json]

A real gateway process (`voltapile gateway`) and a scripted worker process that answers each Step
after --pace milliseconds (0: at once). Only the model's vocabulary is used. CPU time is that of all
of the gateway's threads, from /proc, while the streams run; the first token's time is what the
gateway adds when prefill takes no time at all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import zmq
from streaming import joint_tok_s, stream_completion, together
from voltapile.topology.plan import Plan, from_json
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

    def __init__(self, plan: Plan, pace: float) -> None:
        self.plan, self.pace = plan, pace
        self.position: dict[int, int] = {}
        self.limit: dict[int, int] = {}

    def run(self) -> None:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.set(zmq.IDENTITY, b"text-0")
        socket.set(zmq.LINGER, 0)
        socket.connect(self.plan.endpoint)
        ready = Ready(name="text-0", plan=self.plan.id, instance=1)
        socket.send_multipart(encode(ready))
        free_at, rounds = 0.0, Rounds()
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
            socket.send_multipart(encode(result))

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
def running(plan: Path, pace: float) -> Iterator[tuple[str, int]]:
    """A gateway with its worker; yields (URL, the gateway's process id)."""
    gateway = subprocess.Popen(
        [*COMMAND, "gateway", "--plan", str(plan), "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    worker = None
    try:
        assert gateway.stderr is not None
        url = ""
        for line in gateway.stderr:
            if match := re.search(r"(http://\S+) listens", line):
                url = match[1]
                worker = subprocess.Popen(
                    [sys.executable, __file__, "--worker", str(plan), str(pace)]
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


async def measure(url: str, pid: int, streams: int, tokens: int, repeat: int) -> dict[str, float]:
    prompt = [LETTERS[0]] * PROMPT
    await together(url, [prompt] * streams, 20)  # warm
    firsts = [(await stream_completion(url, prompt, 2)).first_token_seconds for _ in range(20)]
    costs, rates = [], []
    for _ in range(repeat):
        before = cpu_seconds(pid)
        done = await together(url, [prompt] * streams, tokens)
        made = sum(stream.tokens for stream in done)
        assert made == streams * tokens, made
        costs.append((cpu_seconds(pid) - before) / made * 1e6)
        rates.append(joint_tok_s(done))
    return {
        "streams": streams,
        "cpu_us_per_token": round(statistics.median(costs), 1),
        "all_cpu_us": [round(cost, 1) for cost in costs],
        "tok_s": round(statistics.median(rates), 1),
        "first_token_ms": round(statistics.median(firsts) * 1000, 2),
        "worst_first_token_ms": round(max(firsts) * 1000, 2),
    }


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        ScriptedWorker(from_json(Path(sys.argv[2]).read_bytes()), float(sys.argv[3])).run()
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--pace", type=float, nargs="+", default=[0.0, 10.0], help="ms a Step")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        options = [
            "-m",
            args.model,
            "-np",
            str(max(args.streams)),
            "-c",
            "2048",
            "--backend",
            "reference",
        ]
        plan.write_bytes(subprocess.run([*COMMAND, "plan", *options, "--json"], check=True,
                                        stdout=subprocess.PIPE).stdout)  # fmt: skip
        for pace in args.pace:
            tokens = args.tokens if not pace else min(args.tokens, int(5000 / pace))
            with running(plan, pace / 1000) as (url, pid):
                for streams in args.streams:
                    row = asyncio.run(measure(url, pid, streams, tokens, args.repeat))
                    rows.append({"pace_ms": pace} | row)
    if args.json:
        print(json.dumps(rows))
        return 0
    print("| ms a step | streams | CPU us a token | tok/s | first token ms | worst |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        keys = ("pace_ms", "streams", "cpu_us_per_token", "tok_s", "first_token_ms",
                "worst_first_token_ms")  # fmt: skip
        print("| " + " | ".join(str(row[key]) for key in keys) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
