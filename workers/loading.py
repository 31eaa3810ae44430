"""How long each stage of loading takes, for the log; and memory, or a lack of it, beside the Plan.

Stands between an Engine and whoever hears of its progress. Knows no device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from voltapile.topology.gpu import others

TOGETHER = "caches and slots"  # what a GPU's allocations count as one
Progress = Callable[[str, float], None]  # stage, fraction


class Stages:
    """Passes progress on, and keeps when each stage began."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._began: dict[str, float] = {}

    def __call__(self, stage: str, fraction: float) -> None:
        self._began.setdefault(stage, time.perf_counter())
        self._progress(stage, fraction)

    def summary(self, read_bytes: int) -> str:
        """E.g. "loaded in 3.1 s: file 0.4 s, weights 2.5 s (2.0 GB/s), kernels 0.2 s"."""
        names, times = list(self._began), list(self._began.values())
        parts = []
        for name, begin, end in zip(names, times, times[1:], strict=False):
            is_read = name == "weights" and read_bytes
            speed = f" ({read_bytes / (end - begin) / 1e9:.1f} GB/s)" if is_read else ""
            parts.append(f"{name} {end - begin:.1f} s{speed}")
        return f"loaded in {times[-1] - times[0]:.1f} s: {', '.join(parts)}"


def beside(planned: Mapping[str, int], taken: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """(planned, allocated) bytes for each purpose that a backend tells apart; what the process
    itself holds (reserve) is not allocated by us."""
    if TOGETHER in taken:
        together = sum(planned.get(kind, 0) for kind in ("kv", "state", "slots"))
        planned = {**planned, TOGETHER: together}
    return {name: (planned[name], taken[name]) for name in sorted(taken) if name in planned}


def comparison(both: Mapping[str, tuple[int, int]]) -> str:
    """E.g. "memory planned / allocated: kv 1.2 GiB / 1.2 GiB, ..."."""
    parts = [f"{name} {_show(one)} / {_show(other)}" for name, (one, other) in both.items()]
    return f"memory planned / allocated: {', '.join(parts)}"


def shortage(error: MemoryError, planned: Mapping[str, int]) -> MemoryError:
    """`error` with what the Plan has for each purpose."""
    each = ", ".join(f"{name} {_show(nbytes)}" for name, nbytes in planned.items())
    text = str(error) or "out of memory"
    known = others() if text.startswith("the GPU ") else []
    taken = f" ({', '.join(known)})" if known else ""
    return MemoryError(
        f"{text}; the plan has {each}: {_show(sum(planned.values()))} together, so others have "
        f"taken memory that it counted on{taken}. Free that, or plan again, with a smaller -c, -np "
        "or -b if need be"
    )


def _show(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
