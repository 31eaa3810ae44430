"""Collectives of the CPU backend: the group's shared memory, and commands over it.

The other ranks are processes on this machine. What they exchange lies in one Segment that has no
name any more once all have it, so nothing is left when they are killed. Waiting is the engine's
matter (csrc/group.h), and so is whoever does not come.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import numpy as np
from voltapile.kernels.cpu import _cpu
from voltapile.kernels.cpu.scratch import Scratch
from voltapile.kernels.group import Group, shared_memory

ROOM = 512 << 10  # bytes of a rank for each rank: half for sums, half for messages


class CpuCollectives:
    """The part of CpuOps that concerns other ranks; see kernels/group.py."""

    _scratch: Scratch
    _engine: _cpu.Engine
    _heartbeat: int
    taken: Counter[str]
    _ranks = 1

    def join(self, group: Group) -> None:
        self._segment = shared_memory(group, _cpu.Group.bytes(group.ranks, ROOM))
        memory = self._segment.array(np.uint8, (self._segment.nbytes,))
        crowded = group.ranks * self._engine.threads > (os.cpu_count() or 1)
        self._engine.join(
            _cpu.Group(
                memory,
                group.rank,
                group.ranks,
                ROOM,
                group.seconds,
                group.abort_address,
                group.waits_for_address,
                self._heartbeat,
                crowded,
            )
        )
        self._ranks = group.ranks
        self.taken["communication"] = self._segment.nbytes // group.ranks  # it is shared

    def all_reduce(
        self, part: np.ndarray | None, shape: tuple[int, int], add_to: np.ndarray | None = None
    ) -> np.ndarray:
        assert part is None or part.shape == shape, (part.shape, shape)
        assert add_to is None or add_to.shape == shape, (add_to.shape, shape)
        out = self._scratch.array(shape) if add_to is None else add_to
        self._engine.all_reduce(part, out, add_to is not None)
        return out

    def all_gather(self, part: np.ndarray | None, rows: int, widths: Sequence[int]) -> np.ndarray:
        assert len(widths) == self._ranks, (widths, self._ranks)
        out = self._scratch.array((rows, sum(widths)))
        self._engine.all_gather(part, out, list(widths))
        return out

    def broadcast_(self, x: np.ndarray, source: int) -> None:
        self._engine.broadcast(x.reshape(-1).view(np.uint8), source)

    def send(self, x: np.ndarray, target: int) -> None:
        self._engine.send(x, target)

    def receive(self, shape: tuple[int, int], source: int) -> np.ndarray:
        out = self._scratch.array(shape)
        self._engine.receive(out, source)
        return out

    def place(self, x: np.ndarray, width: int, offset: int) -> np.ndarray:
        assert 0 <= offset <= offset + x.shape[1] <= width, (x.shape, width, offset)
        out = self._scratch.array((len(x), width))
        self._engine.place(x, out, offset)
        return out
