"""Checkpoints: copies of what a slot's layers remember, in host memory, by number.

Number 0 is the worker's own: what must be computed twice begins there again. Knows neither requests
nor prefixes, which are the gateway's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from voltapile.kernels.families import FamilyOps
from voltapile.kernels.ops import Ops
from voltapile.workers.protocol import Copy


class Checkpoints:
    """count: as many as the Plan says. states: of this rank's layers, in order; maybe none."""

    def __init__(self, ops: Ops, states: Sequence[Any], count: int) -> None:
        self.ops, self.states = cast(FamilyOps, ops), states
        self.memory = np.zeros((0, 0), np.uint8)
        if states:
            self.memory = self.ops.checkpoint_memory(states, count + 1)

    def copy(self, copy: Copy) -> None:
        """From a slot to a checkpoint, or back."""
        if not self.states:
            return
        if copy.kind == "checkpoint":
            self.ops.save_states(self.states, copy.source, self.memory[copy.target])
        else:
            assert copy.kind == "restore", f"cannot copy a {copy.kind}"
            self.ops.restore_states(self.states, copy.target, self.memory[copy.source])

    @contextlib.contextmanager
    def unchanged(self, slot: int) -> Iterator[None]:
        """What is computed meanwhile leaves a slot's states as they were."""
        self.copy(Copy(kind="checkpoint", source=slot, target=0))
        yield
        self.copy(Copy(kind="restore", source=0, target=slot))

    def finite(self, slot: int) -> list[bool]:
        """Of each state, whether all its numbers are."""
        if not self.states:
            return []
        self.copy(Copy(kind="checkpoint", source=slot, target=0))
        self.ops.synchronize()
        ends = np.cumsum([self.ops.state_bytes(state) for state in self.states])
        parts = np.split(self.memory[0], ends[:-1])
        return [bool(np.isfinite(part.view(np.float32)).all()) for part in parts]
