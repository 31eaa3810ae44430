"""Decode speed through HTTP beside `voltapile bench`, with a real model.

    python bench/http_stream.py -m model.gguf [-t 1] [--tokens 200] [--rounds 3] [--json]

Each round measures, one after the other: bench (the server idles), one stream, eight
streams together, first tokens of 16-token prompts. Ratios are of
medians over rounds, so a busy machine shows in `all_*` and not only in the result. Prompts are
random and new each time, since a cached prompt has no prefill.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator

from gateway_overhead import COMMAND, cpu_seconds
from streaming import joint_tok_s, stream_completion, together
from voltapile.gateway.cli.bench import machine_lock

STREAMS = 8
PROMPT = 16
FIRST_TOKENS = 5  # first tokens of each round
IDS = range(300, 20_000)


@contextlib.contextmanager
def serving(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """(URL, process id) of `voltapile serve`."""
    context = str(PROMPT + args.tokens + 8)
    options = ["-m", args.model, "-t", args.threads, "-np", str(STREAMS), "-c", context]
    if args.interval:
        options += ["--stream-interval-ms", args.interval]
    server = subprocess.Popen(
        [*COMMAND, "serve", *options, "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        url, said = "", []
        for line in server.stderr:
            said.append(line)
            if match := re.search(r"(http://\S+) listens", line):
                url = match[1]
            if line.startswith("ready"):
                break
        else:
            raise RuntimeError("the server ended: " + "".join(said))
        yield url, server.pid
    finally:
        server.terminate()
        server.wait(20)


def bench(args: argparse.Namespace) -> tuple[float, float]:
    """(decode tokens a second, seconds of a 16-token prefill) without a server."""
    options = ["-m", args.model, "-t", args.threads, "-p", str(PROMPT), "-n", str(args.tokens)]
    done = subprocess.run([*COMMAND, "bench", *options, "-r", "1", "--json"], check=True,
                          stdout=subprocess.PIPE)  # fmt: skip
    row = json.loads(done.stdout)
    return row["decode_tok_s"], PROMPT / row["prefill_tok_s"]


def new_prompt() -> list[int]:
    return random.sample(IDS, PROMPT)


async def through_http(url: str, pid: int, tokens: int) -> dict[str, float]:
    before = cpu_seconds(pid)
    alone = await stream_completion(url, new_prompt(), tokens)
    middle = cpu_seconds(pid)
    joint = await together(url, [new_prompt() for _ in range(STREAMS)], tokens)
    after = cpu_seconds(pid)
    firsts = [await stream_completion(url, new_prompt(), 2) for _ in range(FIRST_TOKENS)]
    return {
        "one_tok_s": alone.decode_tok_s,
        "joint_tok_s": joint_tok_s(joint),
        "first_token_ms": statistics.median(s.first_token_seconds for s in firsts) * 1000,
        "one_cpu_us": (middle - before) / tokens * 1e6,
        "joint_cpu_us": (after - middle) / (tokens * STREAMS) * 1e6,
    }


def measure(args: argparse.Namespace) -> dict[str, float | list[float]]:
    rounds: list[dict[str, float]] = []
    with serving(args) as (url, pid):
        asyncio.run(stream_completion(url, new_prompt(), 8))  # warm
        for _ in range(args.rounds):
            decode, prefill = bench(args)
            with machine_lock():
                row = asyncio.run(through_http(url, pid, args.tokens))
            rounds.append(row | {"bench_tok_s": decode, "prefill_ms": prefill * 1000})
    every = {name: [round(row[name], 2) for row in rounds] for name in rounds[0]}
    middle = {name: statistics.median(values) for name, values in every.items()}
    result: dict[str, float | list[float]] = {name: round(x, 2) for name, x in middle.items()}
    result |= {
        "loss_percent": round((1 - middle["one_tok_s"] / middle["bench_tok_s"]) * 100, 1),
        "joint_ratio": round(middle["joint_tok_s"] / middle["one_tok_s"], 2),
        "first_token_above_prefill_ms": round(middle["first_token_ms"] - middle["prefill_ms"], 1),
    }
    return result | {f"all_{name}": values for name, values in every.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-t", "--threads", default="1")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--interval", default="", help="--stream-interval-ms of the server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args)
    if args.json:
        print(json.dumps(result))
        return 0
    rows = [
        ("bench, one sequence, tok/s", "bench_tok_s", ""),
        ("HTTP, one stream, tok/s", "one_tok_s", f"{result['loss_percent']} % less"),
        ("HTTP, 8 streams, tok/s", "joint_tok_s", f"{result['joint_ratio']} times one"),
        ("prefill of 16 tokens, ms", "prefill_ms", ""),
        ("HTTP, first token, ms", "first_token_ms",
         f"{result['first_token_above_prefill_ms']} ms above"),
        ("gateway CPU a token, one stream, us", "one_cpu_us", ""),
        ("gateway CPU a token, 8 streams, us", "joint_cpu_us", ""),
    ]  # fmt: skip
    print("| what | median | | all |\n|---|---|---|---|")
    for what, key, note in rows:
        print(f"| {what} | {result[key]} | {note} | {result[f'all_{key}']} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
