"""voltapile plan: what would run where and every byte it takes, before anything is loaded."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import TYPE_CHECKING

from voltapile.gateway.cli.options import add_model_options, draft_plan

if TYPE_CHECKING:
    from rich.console import RenderableType
    from voltapile.topology.machine import Machine
    from voltapile.topology.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    parser.add_argument("--json", action="store_true", help="print the Plan itself")


def run(args: argparse.Namespace) -> int:
    plan = draft_plan(args)
    if args.json:
        from voltapile.topology.plan import to_json

        sys.stdout.write(to_json(plan).decode() + "\n")
        return 0
    from rich.console import Console
    from voltapile.topology import machine

    computer = machine.load(args.machine) if args.machine else machine.probe()
    console = Console()
    for part in (settings(plan, computer), memory(plan, computer), tensors(plan)):
        console.print(part)
    for warning in plan.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    return 0


def settings(plan: Plan, machine: Machine) -> RenderableType:
    """What the Plan decided."""
    from rich.table import Table

    rank = plan.ranks[0]
    rows = {
        "model": f"{plan.alias} ({plan.architecture}, {len(plan.model)} file(s))",
        "plan": plan.id,
        "machine": f"{machine.name}: {machine.cpu}, {len(machine.nodes)} node(s)",
        "backend": f"{plan.backend}, {rank.threads} thread(s) on node {rank.node}, "
        f"CPUs {','.join(map(str, rank.cpus))}",
        "context": f"{plan.context} tokens for one request",
        "slots": f"{plan.slots} requests at once, steps of up to {plan.batch_tokens} tokens",
        "endpoint": plan.endpoint,
    }
    for cache in plan.caches:
        seen = f"window of {cache.window}" if cache.window else "full"
        rows[f"cache ({len(cache.layers)} layers, {seen})"] = (
            f"{cache.pages - 1} pages of {cache.page_tokens} tokens for all requests; "
            f"keys {cache.key_type}, values {cache.value_type}, "
            f"{cache.page_bytes // cache.page_tokens} bytes a token"
        )
    table = Table(show_header=False, box=None)
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def memory(plan: Plan, machine: Machine) -> RenderableType:
    """Bytes by purpose, against what the machine has."""
    from rich.table import Table

    table = Table("memory", "MiB", title_justify="left")
    table.columns[1].justify = "right"
    total = 0
    for rank in plan.ranks:
        for purpose, nbytes in rank.memory.items():
            table.add_row(purpose, mib(nbytes))
            total += nbytes
    table.add_section()
    table.add_row("allocated", mib(total))
    table.add_row("mapped file (page cache)", mib(sum(rank.mapped_bytes for rank in plan.ranks)))
    table.add_section()
    table.add_row("available", mib(machine.available_bytes))
    table.add_row("memory of the machine", mib(machine.memory_bytes))
    return table


def tensors(plan: Plan) -> RenderableType:
    """Bytes of tensors by type."""
    from rich.table import Table

    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for placement in plan.tensors.values():
        counts[placement.type] += 1
        sizes[placement.type] += placement.bytes
    table = Table("tensors", "count", "MiB")
    for column in table.columns[1:]:
        column.justify = "right"
    for type_name, nbytes in sizes.most_common():
        table.add_row(type_name, str(counts[type_name]), mib(nbytes))
    return table


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"
