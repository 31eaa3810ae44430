"""voltapile plan: what would run where and every byte it takes, before anything is loaded."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from voltapile.gateway.cli.options import add_model_options, make_plan, read_inputs, unbuilt

if TYPE_CHECKING:
    from voltapile.gateway.cli.options import Inputs
    from voltapile.topology.plan import Plan

WIDTH = 120  # of tables that do not go to a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="print the Plan itself")
    add("-o", "--output", type=Path, metavar="FILE",
        help="write the Plan there, if it can be carried out, and print its tables")  # fmt: skip
    add("--endpoint", default="", metavar="ADDRESS",
        help="where gateway and workers will meet, e.g. ipc:///run/voltapile/x.sock")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from voltapile.topology.plan import to_json

    inputs = read_inputs(args)
    plan = make_plan(args) if args.output else inputs.plan()
    if args.output:
        args.output.write_bytes(to_json(plan))
    if args.json:
        sys.stdout.write(to_json(plan).decode() + "\n")
        return 0
    from rich.console import Console
    from voltapile.gateway.cli import plan_tables
    from voltapile.topology.ranks import seen

    computer = seen(inputs.machine, inputs.backend, inputs.options)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    reach = inputs.largest_context(len(plan.ranks)), inputs.trained_context
    console.print(plan_tables.settings(plan, computer, *reach))
    margin = inputs.options.margin_bytes
    console.print(plan_tables.ranks(plan))
    console.print(plan_tables.memory(plan, computer, margin))
    console.print(plan_tables.tensors(plan, inputs.spec))
    if plan.overrides:
        console.print(plan_tables.overrides(plan))
    for line in [*plan_tables.beside(plan, margin), *predictions(inputs, plan), *plan.notes]:
        console.print(line, markup=False, highlight=False)
    if args.output:
        print(written(plan, args.output))
    reason = unbuilt(plan)
    for warning in [*plan.warnings, *([f"not to be loaded: {reason}"] if reason else [])]:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    return 0


def written(plan: Plan, path: Path) -> str:
    """What to do with it."""
    workers = " ".join(f"voltapile-worker@{rank.rank}" for rank in plan.ranks)
    text = f"written to {path}; with the units of systemd/: systemctl enable {workers}"
    if plan.backend == "cuda" and importlib.util.find_spec("cupy") is None:
        text += "\nwarning: cupy is not installed here: .venv/bin/pip install '.[cuda]'"
    return text


def predictions(inputs: Inputs, plan: Plan) -> list[str]:
    """How fast it would be, and how that is known."""
    from voltapile.topology.forecast import PROMPT, forecast, rate

    told = forecast(inputs.spec, inputs.gguf.tensors, plan, inputs.machine)
    if told is None:
        if plan.backend != "cuda":
            return [
                f"speed: not predicted for CPUs; voltapile bench -m {shlex.quote(plan.model[0])}"
            ]
        return [
            "speed: not predicted: the machine's file lacks a bandwidth (of a GPU, its link, a "
            "node or the drive); voltapile probe -m FILE measures the drive's, write others into it"
        ]
    known = "by figures of one such card" if told.is_measured else "arithmetic, not measured"
    lines = [
        f"speed, predicted ({known}): one stream {rate(told.decode)} tokens/s, "
        f"{rate(told.decode_deep)} behind {told.deep:,} tokens, mostly bound by {told.bound_by}"
    ]
    if told.prefill:
        lines[0] += f"; a prompt of {PROMPT}: {rate(told.prefill)} tokens/s"
    return lines
