"""Launchers of what works row by row: embedding, norms, rope, gather, copies, sampling.

Takes a Launcher and device arrays; knows neither cupy nor models.
"""

from __future__ import annotations

from voltapile.kernels.cuda.launch import Instance

INSTANCES: list[Instance] = []
