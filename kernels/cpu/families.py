"""All of kernels/families.py on the CPU."""

from __future__ import annotations

from voltapile.kernels.cpu.delta import CpuDelta
from voltapile.kernels.cpu.experts import CpuExperts
from voltapile.kernels.cpu.positions import CpuPositions
from voltapile.kernels.cpu.sparse import CpuSparse
from voltapile.kernels.cpu.states import CpuStates
from voltapile.kernels.cpu.streams import CpuStreams


class CpuFamilyOps(CpuExperts, CpuDelta, CpuStreams, CpuSparse, CpuStates, CpuPositions):
    pass
