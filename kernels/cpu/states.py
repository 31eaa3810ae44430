"""What layers remember of each slot, on the CPU: a history of inputs, a log, and other arrays.

Commands read and write the arrays; this saves and restores a slot of them. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from voltapile.kernels.families import MAX_PROVISIONAL

Zeros = Callable[[tuple[int, ...], Any, str], np.ndarray]  # shape, dtype and purpose


@dataclass(eq=False)
class State:
    """Of one layer, by slot first. history: the last inputs of its convolution; log: those of a
    provisional step, of which `logged` hold; rest: whatever else the layer remembers."""

    history: np.ndarray  # [slots, depth, width]
    log: np.ndarray  # [slots, MAX_PROVISIONAL, width]
    logged: np.ndarray  # int32[slots]
    rest: list[np.ndarray]

    @property
    def inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the engine takes for a convolution."""
        return self.history, self.log, self.logged

    def slot_bytes(self, slot: int) -> list[np.ndarray]:
        """Views of all that a slot has."""
        arrays = (self.history, self.log, *self.rest, self.logged)
        return [each[slot : slot + 1].reshape(-1).view(np.uint8) for each in arrays]


def new_state(zeros: Zeros, slots: int, depth: int, width: int, rest: list[np.ndarray]) -> State:
    return State(
        zeros((slots, depth, width), np.float32, "state"),
        zeros((slots, MAX_PROVISIONAL, width), np.float32, "state"),
        zeros((slots,), np.int32, "state"),
        rest,
    )


class CpuStates:
    def state_bytes(self, state: State) -> int:
        return sum(view.nbytes for view in state.slot_bytes(0))

    def checkpoint_memory(self, states: Sequence[State], count: int) -> np.ndarray:
        return np.zeros((count, sum(map(self.state_bytes, states))), np.uint8)

    def save_states(self, states: Sequence[State], slot: int, target: np.ndarray) -> None:
        at = 0
        for view in (view for state in states for view in state.slot_bytes(slot)):
            target[at : at + view.nbytes] = view
            at += view.nbytes
        assert at == target.nbytes, (at, target.nbytes)

    def restore_states(self, states: Sequence[State], slot: int, source: np.ndarray) -> None:
        at = 0
        for view in (view for state in states for view in state.slot_bytes(slot)):
            view[...] = source[at : at + view.nbytes]
            at += view.nbytes
        assert at == source.nbytes, (at, source.nbytes)
