"""What the experts of a layer are to launchers: their matrices, and the table that kernels read.

csrc/expert_table.cuh has the table's other half. Knows neither cupy nor models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray

VRAM = 0  # a tier
# csrc/expert_table.cuh: gate, up, down; tier and owner.
PLACE = np.dtype([("matrices", np.uint64, 3), ("tier", np.int32), ("owner", np.int32)])


@dataclass(eq=False)
class ExpertTable:
    """Experts `first` to first + count - 1 of a layer; places: PLACE of each, on the device."""

    gate: CudaWeight
    up: CudaWeight
    down: CudaWeight
    first: int
    places: DeviceArray

    @property
    def count(self) -> int:
        return self.gate.shape[0]

    @property
    def args(self) -> tuple[int | np.int32, ...]:
        """What kernels are told of it."""
        return self.places.ptr, np.int32(self.count), np.int32(self.first)


@dataclass(frozen=True, eq=False)
class Shared:
    """The expert that every token takes; router: of its gate, or None."""

    gate: CudaWeight
    up: CudaWeight
    down: CudaWeight
    router: CudaWeight | None


def places_of(gate: CudaWeight, up: CudaWeight, down: CudaWeight) -> np.ndarray:
    """Of experts that all lie in this GPU's memory."""
    assert gate.shape == up.shape, (gate.shape, up.shape)
    assert down.shape == (gate.shape[0], gate.shape[2], gate.shape[1]), (gate.shape, down.shape)
    places = np.zeros(gate.shape[0], PLACE)
    for part, weight in enumerate((gate, up, down)):
        stride = weight.row_bytes * weight.shape[1]
        places["matrices"][:, part] = weight.ptr + stride * np.arange(len(places), dtype=np.uint64)
    places["tier"] = VRAM
    return places
