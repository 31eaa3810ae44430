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
        size = sum(self.ops.state_bytes(state) for state in states)
        self.memory = np.zeros((count + 1 if size else 0, size), np.uint8)

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

    def is_finite(self, state: Any, slot: int) -> bool:
        """Whether all numbers of one layer's state are."""
        found = np.zeros(self.ops.state_bytes(state), np.uint8)
        self.ops.save_states([state], slot, found)
        return bool(np.isfinite(found[: found.size // 4 * 4].view(np.float32)).all())
