"""voltapile probe: what this computer has, as the JSON that --machine takes.

To plan elsewhere for this computer, or to correct by hand what the system tells wrongly. Speeds of
links follow from their generation and width; that of the model's drive is measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from voltapile.topology.machine import Machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="FILE", help="write there instead of printing")
    add("-m", "--model", type=Path, metavar="FILE",
        help="a file on the drive that models are read from; its speed is measured")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from msgspec import json
    from msgspec.structs import replace
    from voltapile.gateway.cli.environment import visible_gpus
    from voltapile.topology import drive, machine

    found = machine.probe(seen=visible_gpus())
    if args.model:
        args.model.stat()  # a name that is wrong is the caller's error
        speed = drive.measure(args.model)
        found = replace(found, disk=drive.name_of(args.model), disk_bandwidth=speed)
    if args.output:
        machine.save(found, args.output)
        print("\n".join(summary(found)))
    else:
        sys.stdout.write(json.format(json.encode(found)).decode() + "\n")
    return 0


def summary(found: Machine) -> list[str]:
    """For people."""
    lines = [f"{found.name}: {found.cpu}, {_gib(found.available_bytes)} of "
             f"{_gib(found.memory_bytes)} memory free"]  # fmt: skip
    if found.cpu_limit:
        lines.append(f"a control group allows {found.cpu_limit:g} CPUs' worth of time")
    for node in found.nodes:
        lines.append(f"node {node.id}: {node.cores} cores, {_gib(node.memory_bytes)}")
    for other in found.memory_nodes:
        what = "a GPU's memory" if other.is_gpu else "no CPUs"
        lines.append(f"node {other.id}: {_gib(other.memory_bytes)}, {what}: never chosen")
    for gpu in found.gpus:
        way = f"{gpu.host_links} NVLinks to its CPU" if gpu.host_links else _pcie(gpu.pcie)
        home = f"node {gpu.node}" if gpu.node >= 0 else "no node told"
        lines.append(
            f"GPU {gpu.index}: {gpu.name}, {_gib(gpu.free_bytes)} of {_gib(gpu.memory_bytes)} free,"
            f" {home}, {way}, about {gpu.host_bandwidth / 1e9:.0f} GB/s from the host"
        )
    for link in found.links:
        peers = "peers" if link.peer else "no peers"
        lines.append(f"GPUs {link.a} and {link.b}: {link.kind}, {peers}, about "
                     f"{link.bandwidth / 1e9:.0f} GB/s")  # fmt: skip
    if found.disk or found.disk_bandwidth:
        speed = f"{found.disk_bandwidth / 1e9:.1f} GB/s" if found.disk_bandwidth else "not measured"
        lines.append(f"drive: {found.disk or 'no name told'}, {speed}")
    return lines


def _pcie(told: list[int]) -> str:
    return f"PCIe {told[0]} x{told[1]}" if told else "no PCIe link told"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
