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
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from voltapile.gateway.cli.options import add_model_options, make_plan, read_plan
from voltapile.gateway.cli.parser import UsageError

if TYPE_CHECKING:
    from voltapile.shm.gguf import Gguf

LOCK = "voltapile-bench.lock"  # in the system's folder for temporary files
NORMAL_TOKEN = 1  # tokenizer.ggml.token_type of what is neither special nor a lone byte
COLUMNS = {
    "ranks": "ranks",
    "threads": "threads",
    "streams": "streams",
    "depth": "depth",
    "prompt": "prompt",
    "prefill_tok_s": "prefill tok/s",
    "generate": "generate",
    "decode_tok_s": "decode tok/s",
    "gpu_idle": "GPU idle",  # between two recorded steps
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # A Plan names its model; several thread counts give one row each.
    add_model_options(parser, requires_model=False, threads=numbers)
    add = parser.add_argument
    add("-p", "-npp", "--n-prompt", type=int, default=512, metavar="N",
        help="tokens of each prompt")  # fmt: skip
    add("-n", "-ntg", "--n-gen", type=int, default=64, metavar="N",
        help="tokens to generate in each stream")  # fmt: skip
    add("-d", "--n-depth", type=int, default=0, metavar="N",
        help="positions before each prompt, of random keys and values")  # fmt: skip
    add("-npl", "--streams", type=numbers, default="1", metavar="N[,N]",
        help="streams that are computed together; a row for each number")  # fmt: skip
    add("-r", "--repetitions", type=int, default=3, metavar="N", help="medians are over these")
    add("--temp", type=float, default=0.0, metavar="X", help="temperature; 0: greedy")
    add("--seed", type=int, default=1, metavar="N", help="of the random prompts")
    add("--replay", type=Path, metavar="FILE", help="run what serve --record FILE has recorded")
    add("--plan", type=Path, metavar="FILE", help="of --replay, instead of -m and its options")
    add("--dummy", action="store_true", help="random weights; the file may hold its header alone")
    add("--json", action="store_true",
        help="print one JSON object (one thread count and one number of streams only)")  # fmt: skip


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> int:
    if args.replay:
        return run_replay(args)
    if args.plan or not args.model:
        raise UsageError("give -m FILE; --plan is for --replay")
    if min(args.n_prompt, args.n_gen, args.repetitions, *args.streams) < 1:
        raise UsageError("-p, -n, -r and --streams must be at least 1")
    if args.json and max(len(args.threads), len(args.streams)) > 1:
        raise UsageError("--json prints one object: give one thread count with -t, one --streams")
    with machine_lock():
        is_first = True
        for threads in args.threads:
            for row in measure(args, threads):
                if args.json:
                    print(json.dumps(row))
                    continue
                columns = {key: name for key, name in COLUMNS.items() if key in row}
                if is_first:  # not before something was measured
                    print(
                        "| " + " | ".join(columns.values()) + " |\n" + "|---" * len(columns) + "|"
                    )
                print("| " + " | ".join(str(row[key]) for key in columns) + " |", flush=True)
                is_first = False
    return 0


def run_replay(args: argparse.Namespace) -> int:
    from voltapile.gateway.cli.replay import replay

    if (args.plan is None) == (args.model is None):
        raise UsageError("--replay needs either --plan FILE or -m FILE")
    if len(args.threads) > 1:
        raise UsageError("--replay takes one thread count")
    chosen = argparse.Namespace(**{**vars(args), "threads": args.threads[0]})
    plan = read_plan(args.plan) if args.plan else make_plan(chosen)
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


def measure(args: argparse.Namespace, threads: int) -> Iterator[dict[str, Any]]:
    """The medians for one thread count, one row for each number of streams, with the keys of the
    project's other benches."""
    from voltapile.gateway.cli.bench_load import CHUNK, Load, gpu_idle
    from voltapile.gateway.cli.bench_ranks import open_driven
    from voltapile.topology.planner import LEAST_ASKED

    if args.n_depth < 0 or args.n_depth % CHUNK:
        raise UsageError(f"-d must be a multiple of {CHUNK}")
    length = args.n_depth + args.n_prompt + args.n_gen + 1
    chosen = argparse.Namespace(
        **{**vars(args), "threads": threads, "ctx_size": args.ctx_size or max(LEAST_ASKED, length)}
    )
    chosen.parallel = max(args.parallel, *args.streams)
    plan = make_plan(chosen)
    if plan.context < length:
        raise UsageError(f"-d, -p and -n need more than the context of {plan.context} tokens")
    if args.n_depth and len(plan.ranks) > 1:
        raise UsageError("-d fills the caches of one rank, and the plan has several")
    random = np.random.default_rng(args.seed)
    with open_driven(plan, args.dummy) as engine:
        ids = ordinary_ids(engine.gguf)
        for streams in args.streams:
            load = Load(engine, streams, args.n_gen, args.temp, args.n_depth)
            load.run(random.choice(ids, (streams, min(CHUNK, args.n_prompt))), min(4, args.n_gen))
            prompts = [
                random.choice(ids, (streams, args.n_prompt)) for _ in range(args.repetitions)
            ]
            times = [load.run(each) for each in prompts]
            prefill = [streams * args.n_prompt / each[0] for each in times]
            decode = [streams * args.n_gen / each[1] for each in times]
            row = {
                "engine": engine_name(plan.backend),
                "threads": sum(rank.threads for rank in plan.ranks),
                "prompt": args.n_prompt,
                "prefill_tok_s": round(statistics.median(prefill), 2),
                "generate": args.n_gen,
                "decode_tok_s": round(statistics.median(decode), 2),
                "all_prefill": [round(x, 1) for x in prefill],
                "all_decode": [round(x, 1) for x in decode],
                "streams": streams,
            }
            if len(plan.ranks) > 1:
                row["ranks"] = len(plan.ranks)
            idle = gpu_idle(load, prompts[0])
            row |= {"depth": args.n_depth} if args.n_depth else {}
            yield row if idle is None else row | {"gpu_idle": f"{idle:.1%}"}


def engine_name(backend: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    with contextlib.suppress(PackageNotFoundError):  # run from a checkout
        return f"voltapile {version('voltapile')} {backend}"
    return f"voltapile {backend}"


def ordinary_ids(gguf: Gguf) -> np.ndarray:
    """Ids of ordinary text: neither special tokens nor padding rows."""
    kinds = np.asarray(gguf.metadata.get("tokenizer.ggml.token_type", []))
    ids = np.flatnonzero(kinds == NORMAL_TOKEN)
    if len(ids):
        return ids.astype(np.int32)
    return np.arange(gguf.tensors["token_embd.weight"].shape[0], dtype=np.int32)
