"""voltapile bench: prefill and decode speed of one sequence, sampling included, without a server.

Runs the worker's Engine in this process with Steps as a gateway would send them. Prompts are random
and new for each repetition. Holds a lock, so that two benches on a machine wait for each other.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from voltapile.gateway.cli.options import add_model_options, make_plan

if TYPE_CHECKING:
    from voltapile.shm.gguf import Gguf
    from voltapile.workers.engine import Engine
    from voltapile.workers.protocol import Step

LOCK = "voltapile-bench.lock"  # in the system's folder for temporary files
NORMAL_TOKEN = 1  # tokenizer.ggml.token_type of what is neither special nor a lone byte
HEADER = "| threads | prompt | prefill tok/s | generate | decode tok/s |\n|---|---|---|---|---|"
CHUNK = 64  # prompts are cut at multiples of it, as the gateway does


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # A Plan names its model; several thread counts give one row each.
    add_model_options(parser, requires_model=False, threads=numbers)
    add = parser.add_argument
    add("-p", "--n-prompt", type=int, default=512, metavar="N", help="tokens of the prompt")
    add("-n", "--n-gen", type=int, default=64, metavar="N", help="tokens to generate")
    add("-r", "--repetitions", type=int, default=3, metavar="N", help="medians are over these")
    add("--temp", type=float, default=0.0, metavar="X", help="temperature; 0: greedy")
    add("--seed", type=int, default=1, metavar="N", help="of the random prompts")
    add("--replay", type=Path, metavar="FILE", help="run what serve --record FILE has recorded")
    add("--plan", type=Path, metavar="FILE", help="of --replay, instead of -m and its options")
    add("--dummy", action="store_true", help="random weights; the file may hold its header alone")
    add("--json", action="store_true", help="print one JSON object (one thread count only)")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> int:
    if args.replay:
        return run_replay(args)
    if args.plan or not args.model:
        raise ValueError("give -m FILE; --plan is for --replay")
    if min(args.n_prompt, args.n_gen, args.repetitions) < 1:
        raise ValueError("-p, -n and -r must be at least 1")
    if args.json and len(args.threads) > 1:
        raise ValueError("--json prints one object: give one thread count with -t")
    with machine_lock():
        if args.json:
            print(json.dumps(measure(args, args.threads[0])))
            return 0
        for i, threads in enumerate(args.threads):
            row = measure(args, threads)
            if i == 0:  # not before something was measured
                print(HEADER)
            keys = ("threads", "prompt", "prefill_tok_s", "generate", "decode_tok_s")
            print("| " + " | ".join(str(row[key]) for key in keys) + " |", flush=True)
    return 0


def run_replay(args: argparse.Namespace) -> int:
    from voltapile.gateway.cli.replay import replay
    from voltapile.topology.plan import from_json

    if (args.plan is None) == (args.model is None):
        raise ValueError("--replay needs either --plan FILE or -m FILE")
    if len(args.threads) > 1:
        raise ValueError("--replay takes one thread count")
    chosen = argparse.Namespace(**{**vars(args), "threads": args.threads[0]})
    plan = from_json(args.plan.read_bytes()) if args.plan else make_plan(chosen)
    with machine_lock():
        return replay(args.replay, plan, args.json)


@contextlib.contextmanager
def machine_lock() -> Iterator[None]:
    """Wait until no other bench measures on this machine."""
    path = Path(tempfile.gettempdir()) / LOCK
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another bench on this machine ...", file=sys.stderr)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def measure(args: argparse.Namespace, threads: int) -> dict[str, Any]:
    """The medians for one thread count, with the keys of the project's other benches."""
    from voltapile.workers.engine import open_engine

    context = args.ctx_size or args.n_prompt + args.n_gen + 1
    chosen = argparse.Namespace(**{**vars(args), "threads": threads, "ctx_size": context})
    chosen.parallel = args.parallel or 1
    plan = make_plan(chosen)
    if plan.context < args.n_prompt + args.n_gen + 1:
        raise ValueError(f"-p and -n need more than the context of {plan.context} tokens")
    random = np.random.default_rng(args.seed)
    prefill, decode = [], []
    with open_engine(plan, is_dummy=args.dummy) as engine:
        ids = ordinary_ids(engine.gguf)
        warm_up = random.choice(ids, min(CHUNK, args.n_prompt))  # reads the file, wakes the threads
        once(engine, warm_up, min(4, args.n_gen), args.temp)
        for _ in range(args.repetitions):
            prompt = random.choice(ids, args.n_prompt)
            seconds = once(engine, prompt, args.n_gen, args.temp)
            prefill.append(args.n_prompt / seconds[0])
            decode.append(args.n_gen / seconds[1])
    return {
        "engine": engine_name(plan.backend),
        "threads": plan.ranks[0].threads,
        "prompt": args.n_prompt,
        "prefill_tok_s": round(statistics.median(prefill), 2),
        "generate": args.n_gen,
        "decode_tok_s": round(statistics.median(decode), 2),
        "all_prefill": [round(x, 1) for x in prefill],
        "all_decode": [round(x, 1) for x in decode],
    }


def engine_name(backend: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    with contextlib.suppress(PackageNotFoundError):  # run from a checkout
        return f"voltapile {version('voltapile')} {backend}"
    return f"voltapile {backend}"


def once(
    engine: Engine, prompt: Sequence[int] | np.ndarray, count: int, temperature: float
) -> tuple[float, float]:
    """Seconds to the first token, and of `count` more."""
    from voltapile.workers.engine import first_pages
    from voltapile.workers.protocol import Row, Sampling, Step

    began = time.perf_counter()
    tokens = np.asarray(prompt, np.int32)
    most = max(CHUNK, engine.plan.batch_tokens // CHUNK * CHUNK)
    steps = []
    for start in range(0, len(tokens), most):
        row = Row(slot=0, start=start, tokens=tokens[start : start + most])
        row.sample = start + most >= len(tokens)
        if start == 0:
            row.sampling = Sampling(temperature=temperature, seed=1)
            row.pages = first_pages(engine.plan, len(tokens) + count + 1)
        steps.append(Step(id=start, rows=[row]))
    run_ahead(engine, steps)
    middle = time.perf_counter()
    run_ahead(engine, [Step(id=i, rows=[Row(slot=0)]) for i in range(count)])
    ended = time.perf_counter()
    engine.run(Step(id=0, release=[0]))
    return middle - began, ended - middle


def run_ahead(engine: Engine, steps: Sequence[Step]) -> None:
    """One Step is submitted while the one before it is computed, as a worker does."""
    before = None
    for step in steps:
        pending = engine.submit(step)
        if before is not None:
            engine.collect(before)
        before = pending
    if before is not None:
        engine.collect(before)


def ordinary_ids(gguf: Gguf) -> np.ndarray:
    """Ids of ordinary text: neither special tokens nor padding rows."""
    kinds = np.asarray(gguf.metadata.get("tokenizer.ggml.token_type", []))
    ids = np.flatnonzero(kinds == NORMAL_TOKEN)
    if len(ids):
        return ids.astype(np.int32)
    return np.arange(gguf.tensors["token_embd.weight"].shape[0], dtype=np.int32)
