"""Makes the Ops of a backend by its name, importing only that backend."""

from __future__ import annotations

from collections.abc import Mapping

from voltapile.kernels.backend import NAMES
from voltapile.kernels.ops import Ops


def load(
    name: str,
    threads: int = 1,
    scratch_bytes: int = 0,
    cpus: list[int] | None = None,
    heartbeat: int = 0,
    abort: int = 0,
    device: str = "",
    choices: Mapping[str, str] | None = None,
) -> Ops:
    """The Ops called `name`; the rest is as in CpuOps, and nothing to the reference.

    device, choices: a Plan's, e.g. "cuda:0"; what it says of whatever changes bits."""
    if name == "cpu":
        from voltapile.kernels.cpu.families import CpuFamilyOps

        return CpuFamilyOps(threads, scratch_bytes, cpus, heartbeat, abort)
    if name == "reference":
        from voltapile.kernels.reference.families import ReferenceFamilyOps

        return ReferenceFamilyOps()
    if name == "cuda":
        try:
            from voltapile.kernels.cuda.family_ops import CudaFamilyOps
        except ModuleNotFoundError as error:
            if error.name != "cupy":
                raise
            raise ValueError(
                "the cuda backend needs cupy: pip install '.[cuda]', or -ngl 0 for the CPU"
            ) from None
        return CudaFamilyOps(int(device.partition(":")[2] or 0), scratch_bytes, choices=choices)
    raise ValueError(f"unknown backend {name!r}; there are {', '.join(NAMES)}")
