"""What layers remember of each slot, in a GPU's memory, and its way to the host and back.

Knows where the values lie, not what they mean: csrc/state_rows.cuh reads and writes them; see
kernels/families.py. One kernel writes a slot's values where the host has them, in order with the
steps, so that nothing is staged and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Launcher
from voltapile.kernels.families import MAX_PROVISIONAL

TAP_KINDS = {"F32": 0, "F16": 1, "BF16": 2}  # of convolutions' taps; csrc/state_rows.cuh
MOVE = Instance("state_move.cu", "move_states")
INSTANCES = [MOVE]
PIECES = 32  # blocks of an array, which are a few MB where it matters
ALIGNMENT = 16  # of an array in a row


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
        return [array[slot : slot + 1] for array in (*self.values, *self.log, self.logged)]


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


def state_bytes(state: State) -> int:
    """Of a slot, in a row."""
    return sum(_aligned(array.nbytes) for array in state.slot_arrays(0))


@dataclass(eq=False)
class _Pack:
    """places: see csrc/state_move.cu. nbytes: of a slot's row."""

    states: tuple[State, ...]  # kept, since they are known by identity
    places: DeviceArray
    nbytes: int


class Porter:
    """Carries a slot's states to page-locked memory and back: a launch for all of them."""

    def __init__(self, ops: Launcher) -> None:
        self._ops = ops
        self._packs: dict[tuple[int, ...], _Pack] = {}

    def pack(self, states: Sequence[State]) -> _Pack:
        """What carrying these needs; made when it is asked for first."""
        key = tuple(map(id, states))
        if key not in self._packs:
            self._packs[key] = _packed(self._ops, states)
        return self._packs[key]

    def save(self, states: Sequence[State], slot: int, target: np.ndarray) -> None:
        self._move(states, slot, target, is_restored=False)

    def restore(self, states: Sequence[State], slot: int, source: np.ndarray) -> None:
        self._move(states, slot, source, is_restored=True)

    def _move(
        self, states: Sequence[State], slot: int, host: np.ndarray, is_restored: bool
    ) -> None:
        pack = self.pack(states)
        assert host.nbytes == pack.nbytes, (host.nbytes, pack.nbytes)
        assert host.ctypes.data % ALIGNMENT == 0, host.ctypes.data
        assert 0 <= slot < states[0].slots, slot
        self._ops.kernel(MOVE)(
            (PIECES, len(pack.places)),
            256,
            (pack.places.ptr, host.ctypes.data, np.int32(slot), np.int32(is_restored)),
        )


def _packed(ops: Launcher, states: Sequence[State]) -> _Pack:
    places, end = [], 0
    for array in (array for state in states for array in state.slot_arrays(0)):
        places.append((array.ptr, array.nbytes, end))
        end += _aligned(array.nbytes)
    ops.kernel(MOVE)  # fetched now, not amid a step
    return _Pack(tuple(states), ops.constant(np.array(places, np.int64)), end)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
