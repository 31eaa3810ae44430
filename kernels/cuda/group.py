"""Collectives of the CUDA backend. So far only those of a group of one.

Knows neither cupy nor processes.
"""

from __future__ import annotations

from collections.abc import Sequence

from voltapile.kernels.cuda.launch import DeviceArray
from voltapile.kernels.group import Group


class CudaCollectives:
    """The part of CudaOps that concerns other ranks; see kernels/group.py."""

    def join(self, group: Group) -> None:
        raise ValueError("several CUDA ranks are not built yet; use --ranks 1")

    def all_reduce(
        self, part: DeviceArray | None, shape: tuple[int, int], add_to: DeviceArray | None = None
    ) -> DeviceArray:
        assert part is not None, "alone, a rank owns everything"
        assert add_to is None, "alone, linear adds"
        return part

    def all_gather(self, part: DeviceArray | None, rows: int, widths: Sequence[int]) -> DeviceArray:
        assert part is not None, "alone, a rank owns everything"
        return part

    def broadcast_(self, x: DeviceArray, source: int) -> None:
        pass

    def send(self, x: DeviceArray, target: int) -> None:
        raise AssertionError("alone")

    def receive(self, shape: tuple[int, int], source: int) -> DeviceArray:
        raise AssertionError("alone")

    def place(self, x: DeviceArray, width: int, offset: int) -> DeviceArray:
        assert (x.shape[1], offset) == (width, 0), "alone, a rank owns everything"
        return x
