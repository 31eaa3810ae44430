"""What several CPU ranks cost beside one: wall and CPU time of a step, taken in turns.

    python bench/ranks.py -m FILE [--ranks 2,3,6] [--split-mode tensor] [-p 128] [-n 64] [-r 3]

All ranks together have the threads of the one (-t, 0: one for each core; a rank has one at least),
so the best that several can do is the same. CPU time is user and system time of all processes that
compute; it tells more than wall time on a machine that others use.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from voltapile.gateway.cli.bench_load import Load
from voltapile.gateway.cli.bench_ranks import open_ranks
from voltapile.kernels.backend import describe
from voltapile.shm.gguf import Gguf
from voltapile.topology import machine
from voltapile.topology.architectures import spec_of
from voltapile.topology.endpoint import private_endpoint
from voltapile.topology.plan import Backend, Options, Plan
from voltapile.topology.planner import plan

TICK = os.sysconf("SC_CLK_TCK")


def plan_of(args: argparse.Namespace, ranks: int) -> Plan:
    options = Options(
        context=args.n_prompt + args.n_gen + 64,
        slots=1,
        threads=args.threads,
        ranks=ranks,
        split_mode=args.split_mode if ranks > 1 else "",
        endpoint=private_endpoint(),
    )
    with Gguf.open(args.model) as gguf:
        backend = Backend(**describe("cpu"))
        return plan(spec_of(gguf), gguf, machine.probe(), backend, options)


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / TICK


def measure(args: argparse.Namespace, ranks: int) -> dict[str, float]:
    """Milliseconds of a prompt's and of a decode step: by the clock and of the CPUs."""
    with open_ranks(plan_of(args, ranks)) as found:
        load = Load(found, 1, args.n_gen, 0.0)
        prompt = np.random.default_rng(1).integers(0, 600, (1, args.n_prompt))
        load.run(prompt[:, :64], 4)
        before = cpu_seconds(found.pids)
        prefill, _ = load.run(prompt, 1)
        middle = cpu_seconds(found.pids)
        again, decode = load.run(prompt, args.n_gen)
        end = cpu_seconds(found.pids)
    of_decode = end - middle - (middle - before)  # the prompt was computed twice
    return {
        "prompt": 1e3 * min(prefill, again),
        "prompt cpu": 1e3 * (middle - before),
        "decode": 1e3 * decode / args.n_gen,
        "decode cpu": 1e3 * of_decode / args.n_gen,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("-m", "--model", required=True)
    add("--ranks", default="2,3,6", help="numbers of ranks")
    add("-sm", "--split-mode", default="tensor")
    add("-t", "--threads", type=int, default=0)
    add("-p", "--n-prompt", type=int, default=128)
    add("-n", "--n-gen", type=int, default=64)
    add("-r", "--repetitions", type=int, default=3)
    args = parser.parse_args()
    counts = [1, *map(int, args.ranks.split(","))]
    found: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in counts}
    for _ in range(args.repetitions):
        for ranks in counts:
            found[ranks].append(measure(args, ranks))
    names = list(found[1][0])
    medians = {
        ranks: {name: statistics.median(each[name] for each in rows) for name in names}
        for ranks, rows in found.items()
    }
    print("| ranks | " + " | ".join(f"{name} ms | x" for name in names) + " |")
    print("|---" * (2 * len(names) + 1) + "|")
    for ranks, values in medians.items():
        cells = [f"{values[n]:.2f} | {values[n] / medians[1][n]:.2f}" for n in names]
        print(f"| {ranks} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
