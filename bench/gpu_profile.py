"""Where a decode step on a GPU goes: time by kernel of one eager step, and the step's wall time.

    ncu --clock-control none --metrics gpu__time_duration.sum --csv --log-file ncu.csv \
        python bench/gpu_profile.py MODEL.gguf --steps 1
    python bench/gpu_profile.py --read ncu.csv

Weights are random (--dummy): only the file's header is read. Under ncu only the steps after the
prompt are profiled (cudaProfilerStart); without it the captured step is timed too.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np


def read(path: Path) -> None:
    """Print ncu's log as one row for each kernel."""
    lines = path.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    times: dict[str, list[float]] = defaultdict(list)
    for row in csv.DictReader(lines[start:]):
        unit = {"us": 1.0, "ns": 1e-3, "ms": 1e3}.get(row["Metric Unit"], 1.0)
        value = float(row["Metric Value"].replace(",", "")) * unit
        times[f"{row['Kernel Name']} {row['Grid Size']}"].append(value)
    total = sum(map(sum, times.values()))
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1])):
        print(f"{len(each):5} x {statistics.median(each):8.2f} us = {sum(each):9.1f} us  {name}")
    print(f"{sum(map(len, times.values()))} kernels, {total:.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--read", type=Path)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    if args.read:
        read(args.read)
        return
    from cupy.cuda import profiler
    from voltapile.gateway.cli.bench_load import run_ahead
    from voltapile.gateway.cli.main import parser_for
    from voltapile.gateway.cli.options import make_plan
    from voltapile.workers.engine import first_pages, open_engine
    from voltapile.workers.protocol import Row, Sampling, Step

    options = ["-m", args.model, "-c", str(args.prompt + 2 * args.steps + 64), "-np", "1"]
    plan = make_plan(parser_for("plan").parse_args([*options, "--backend", "cuda"]))
    with open_engine(plan, is_dummy=True) as engine:
        tokens = np.arange(300, 300 + args.prompt, dtype=np.int32)
        pages = first_pages(plan, plan.context)
        row = Row(slot=0, tokens=tokens, sampling=Sampling(), pages=pages)
        engine.run(Step(id=0, rows=[row]))
        began = time.perf_counter()
        for i in range(5):
            engine.run(Step(id=i, rows=[Row(slot=0)]))
        print(f"one by one: {200 * (time.perf_counter() - began):.3f} ms a step", file=sys.stderr)
        for name in ("captured", "eager"):
            if name == "eager":
                engine.graphs.clear()
                profiler.start()
            began = time.perf_counter()
            run_ahead(engine, [Step(id=i, rows=[Row(slot=0)]) for i in range(args.steps)])
            seconds = (time.perf_counter() - began) / args.steps
            print(f"{name}: {1e3 * seconds:.3f} ms a step", file=sys.stderr)
        profiler.stop()


if __name__ == "__main__":
    main()
