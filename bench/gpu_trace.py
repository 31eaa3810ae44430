"""Where the time of a prompt and of decode steps goes on one GPU, by kernel, as CUPTI sees it.

    python bench/gpu_trace.py -m MODEL.gguf --dummy -p 2048 -b 2048 [-d 200000 -ctk q8_0 -ctv q8_0]

Takes the options of `voltapile bench`; needs PyTorch, whose profiler reads CUPTI. A launch adds the
time from the latest end of those before it to its own end, so that launches which overlap add up to
the whole: what it costs where it is, not how long it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from voltapile.gateway.cli.bench_load import Load, run_ahead
from voltapile.gateway.cli.main import parser_for
from voltapile.gateway.cli.options import make_plan
from voltapile.workers.engine import open_engine
from voltapile.workers.protocol import Row, Step

STEPS = 20
SHOWN = 45  # kernels


@dataclass(frozen=True)
class Launch:
    name: str
    start: float  # us
    end: float


def traced(run: Callable[[], None]) -> list[Launch]:
    """What the GPU does meanwhile, by its start."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
    events = found.profiler.kineto_results.events()
    launches = [
        Launch(each.name(), each.start_ns() / 1e3, (each.start_ns() + each.duration_ns()) / 1e3)
        for each in events
        if each.device_type() == DeviceType.CUDA
    ]
    return sorted(launches, key=lambda each: (each.start, each.end))


def added(launches: list[Launch]) -> dict[str, list[float]]:
    """By kernel, what each of its launches adds."""
    found: dict[str, list[float]] = defaultdict(list)
    latest = min(each.start for each in launches)
    for each in sorted(launches, key=lambda each: each.end):
        found[each.name].append(each.end - latest)
        latest = max(latest, each.end)
    return found


def table(launches: list[Launch], steps: int) -> list[str]:
    """Lines for a step: how often, what it adds in all and each, how long it runs."""
    runs: dict[str, float] = defaultdict(float)
    for each in launches:
        runs[each.name] += each.end - each.start
    rows = sorted(added(launches).items(), key=lambda item: -sum(item[1]))
    whole = sum(sum(each) for _, each in rows)
    lines = [
        f"{len(launches) / steps:.0f} launches, {whole / steps:.1f} us",
        f"{'launches':>8} {'adds':>8} {'each':>8} {'runs':>8}  us",
    ]
    for name, each in rows[:SHOWN]:
        lines.append(
            f"{len(each) / steps:7.1f} {sum(each) / steps:9.1f} {sum(each) / len(each):8.2f} "
            f"{runs[name] / len(each):8.2f}  {sum(each) / whole:6.1%}  {name[:60]}"
        )
    return lines


def main() -> None:
    args = parser_for("bench").parse_args(sys.argv[1:])
    length = args.n_depth + args.n_prompt + STEPS + 1
    own = {"threads": args.threads[0], "parallel": 1, "ctx_size": args.ctx_size or length}
    plan = make_plan(argparse.Namespace(**{**vars(args), **own}))
    with open_engine(plan, is_dummy=args.dummy) as engine:
        load = Load(engine, 1, STEPS, 0.0, args.n_depth)
        random = np.random.default_rng(0)
        prompts = [random.integers(300, 1000, (1, args.n_prompt)) for _ in range(2)]
        load.run(prompts[0])
        prompt = traced(lambda: run_ahead(engine, list(load._prefill(prompts[1], STEPS))))
        steps = [Step(id=i, rows=[Row(slot=0)]) for i in range(STEPS)]
        decode = traced(lambda: run_ahead(engine, steps))
    print("\n".join(["a prompt:", *table(prompt, 1), "a step:", *table(decode, STEPS)]))


if __name__ == "__main__":
    main()
