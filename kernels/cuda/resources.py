"""What a kernel takes of a multiprocessor: registers, spilled bytes, stack, shared memory.

Read from the compiler's log, so that it needs no GPU. tests/kernels/cuda keeps a table of them;
more than the table says, or a spill for NEVER_SPILL, is a failure there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from voltapile.kernels.cuda.compile import compile_log
from voltapile.kernels.cuda.launch import Instance

NEVER_SPILL = ("sm_70", "sm_75")
ARCHS = (*NEVER_SPILL, "sm_90")
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """shared: static bytes alone; a launch may ask for more. stack: bytes of a thread's own
    arrays, which is not yet a spill."""

    registers: int
    spilled: int
    stack: int
    shared: int


def resources_of(instance: Instance, arch: str, cache: Path | None = None) -> Resources:
    return parse(compile_log(instance, arch, cache), instance.function)


def parse(log: str, function: str) -> Resources:
    """Of one entry function in a log of ptxas -v."""
    parts = _ENTRY.split(log)
    named = dict(zip(parts[1::2], parts[2::2], strict=True))
    if function not in named:
        raise ValueError(f"the compiler's log does not speak of {function!r}:\n{log}")
    text = named[function]
    frames = [tuple(map(int, found)) for found in _SPILLS.findall(text)]
    used, shared = _USED.search(text), _SHARED.search(text)
    if used is None:
        raise ValueError(f"the compiler's log has no registers of {function!r}:\n{text}")
    return Resources(
        registers=int(used[1]),
        spilled=sum(stores + loads for _, stores, loads in frames),
        stack=frames[0][0] if frames else 0,
        shared=int(shared[1]) if shared else 0,
    )


def table(
    instances: Sequence[Instance], archs: Sequence[str] = ARCHS, cache: Path | None = None
) -> dict[str, dict[str, list[int]]]:
    """{architecture: {instance: [registers, spilled, stack, shared]}}, as it is kept."""
    return {
        arch: {
            instance.name: list(asdict(resources_of(instance, arch, cache)).values())
            for instance in instances
        }
        for arch in archs
    }
