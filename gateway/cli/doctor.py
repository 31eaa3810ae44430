"""voltapile doctor: what of this computer keeps a server from starting, or from being fast.

Prints a line for each thing that was looked at, and below it what to change. Exit code 1 says that
something keeps the server from working; 0, that nothing does, though speed may be lost.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from voltapile.topology.doctor import Finding
    from voltapile.topology.machine import Machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="leave out what is well")


def run(args: argparse.Namespace) -> int:
    from voltapile.gateway.cli.environment import visible_gpus
    from voltapile.topology import machine
    from voltapile.topology.doctor import Sight, examine

    seen = visible_gpus()
    found = machine.probe(seen=seen)
    findings = [*installation(found), *choice(found, seen), *examine(Sight(found))]
    for each in findings:
        if args.quiet and each.level == "ok":
            continue
        print(f"{each.level:5}  {each.what}")
        if each.remedy:
            print(f"       -> {each.remedy}")
    counts = {level: sum(each.level == level for each in findings) for level in ("fault", "slow")}
    print(f"{counts['fault']} fault(s), {counts['slow']} thing(s) that cost speed")
    return 1 if counts["fault"] else 0


def installation(found: Machine) -> Iterator[Finding]:
    """What voltapile itself needs."""
    from voltapile.topology.doctor import Finding

    try:
        importlib.import_module("voltapile.kernels.cpu._cpu")
        yield Finding("ok", "the C++ module loads")
    except ImportError as error:
        yield Finding(
            "fault", f"the C++ module does not load: {error}", "pip install voltapile again"
        )
    if not found.gpus:
        return
    if importlib.util.find_spec("cupy") is None:
        yield Finding("fault", "there are GPUs, and cupy is not installed: the CPU would compute",
                      ".venv/bin/pip install '.[cuda]'")  # fmt: skip
        return
    yield from _cuda([gpu.bus for gpu in found.gpus])


def choice(found: Machine, seen: str | None) -> Iterator[Finding]:
    """seen: CUDA_VISIBLE_DEVICES."""
    from voltapile.topology.doctor import Finding

    if seen is not None:
        which = ", ".join(f"cuda:{gpu.index} at {gpu.bus}" for gpu in found.gpus) or "none"
        yield Finding("note", f"CUDA_VISIBLE_DEVICES={seen!r} leaves these GPUs: {which}",
                      "unset it for all")  # fmt: skip


def _cuda(buses: list[str]) -> Iterator[Finding]:
    """buses: of the GPUs that are seen, in the order that --device counts by."""
    from voltapile.topology.doctor import Finding

    try:
        from voltapile.kernels.cuda.device import addresses

        seen = addresses()
    except (ImportError, OSError) as error:
        yield Finding("fault", f"cupy does not load: {error}", ".venv/bin/pip install '.[cuda]'")
        return
    if len(seen) < len(buses):
        yield Finding(
            "fault" if not seen else "slow",
            f"CUDA sees {len(seen)} of {len(buses)} GPUs",
            "CUDA_VISIBLE_DEVICES must name whole GPUs, and no compute mode may forbid their use",
        )
    elif all(buses) and seen != buses:
        yield Finding(
            "fault",
            f"CUDA counts GPUs as {', '.join(seen)}, the driver as {', '.join(buses)}",
            "CUDA_DEVICE_ORDER=PCI_BUS_ID for every process, or GPUs would be taken for others",
        )
    else:
        yield Finding("ok", f"CUDA sees {len(seen)} GPU(s), in the driver's order")
