"""What layers remember of each slot, in a GPU's memory; see kernels/families.py.

Knows where the values lie, not what they mean: csrc/state_rows.cuh reads and writes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Launcher
from voltapile.kernels.families import MAX_PROVISIONAL

TAP_KINDS = {"F32": 0, "F16": 1, "BF16": 2}  # of convolutions' taps; csrc/state_rows.cuh


@dataclass(eq=False)
class State:
    """Of one layer. values: what is remembered, by slot first. log: inputs of the tokens of a
    provisional step, by slot and token; logged: how many they are."""

    values: list[DeviceArray]
    log: list[DeviceArray]
    logged: DeviceArray  # int32 [slots]

    @property
    def slots(self) -> int:
        return len(self.logged)

    def slot_arrays(self, slot: int) -> list[DeviceArray]:
        arrays = [array[slot : slot + 1] for array in (*self.values, *self.log)]
        return [*arrays, self.logged[slot : slot + 1]]


def make_state(
    ops: Launcher, slots: int, values: list[tuple[int, ...]], log: list[tuple[int, ...]]
) -> State:
    """Shapes of one slot's values, and of what is logged of a token."""
    return State(
        [ops.zeros((slots, *shape), np.float32) for shape in values],
        [ops.zeros((slots, MAX_PROVISIONAL, *shape), np.float32) for shape in log],
        ops.zeros((slots,), np.int32),
    )


def tap_kind(taps: CudaWeight) -> np.int32:
    if taps.type_name not in TAP_KINDS:
        raise ValueError(f"taps of a convolution as {taps.type_name}: not in the cuda backend")
    return np.int32(TAP_KINDS[taps.type_name])
