"""What layers remember of each slot, in plain numpy: a history of rows, and a log of a last step.

Knows no model: `take` gives what a row finds and `put` what it leaves; see kernels/families.py for
provisional steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from voltapile.kernels.families import MAX_PROVISIONAL


@dataclass(eq=False)
class State:
    """Of one layer. values: one array for each thing that is remembered, by slot first. log:
    inputs of the tokens of a provisional step, by slot and token; logged: how many they are."""

    values: list[np.ndarray]
    log: list[np.ndarray]
    logged: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.logged = np.zeros(len(self.values[0]), np.int32)

    def note(self, slot: int, inputs: Sequence[np.ndarray]) -> None:
        """Log the inputs of a provisional step, one array for each, by token first."""
        count = len(inputs[0])
        assert count <= MAX_PROVISIONAL, f"{count} provisional tokens"
        for log, values in zip(self.log, inputs, strict=True):
            log[slot, :count] = values
        self.logged[slot] = count

    def take_log(self, slot: int, kept: np.ndarray | None) -> list[np.ndarray]:
        """The inputs of a provisional step that stand, and forget them. kept: by slot."""
        count = int(self.logged[slot])
        if kept is not None:
            count = min(count, int(kept[slot]))
        self.logged[slot] = 0
        return [log[slot, :count].copy() for log in self.log]

    def slot_arrays(self, slot: int) -> list[np.ndarray]:
        arrays = [array[slot : slot + 1] for array in (*self.values, *self.log)]
        return [*arrays, self.logged[slot : slot + 1]]


class ReferenceStates:
    def state_bytes(self, state: State) -> int:
        return sum(array.nbytes for array in state.slot_arrays(0))

    def checkpoint_memory(self, states: Sequence[State], count: int) -> np.ndarray:
        return np.zeros((count, sum(map(self.state_bytes, states))), np.uint8)

    def save_states(self, states: Sequence[State], slot: int, target: np.ndarray) -> None:
        arrays = [array for state in states for array in state.slot_arrays(slot)]
        target[...] = np.concatenate([array.view(np.uint8).reshape(-1) for array in arrays])

    def restore_states(self, states: Sequence[State], slot: int, source: np.ndarray) -> None:
        at = 0
        for state in states:
            for array in state.slot_arrays(slot):
                array.view(np.uint8).reshape(-1)[...] = source[at : at + array.nbytes]
                at += array.nbytes
