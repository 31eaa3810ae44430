"""Arguments of launches lie where the driver looks for them; kernels that start early wait."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest
from voltapile.kernels.cuda import compile as compiler
from voltapile.kernels.cuda import nvrtc
from voltapile.kernels.cuda.launch import Instance
from voltapile.kernels.cuda.submit import Arguments
from voltapile.kernels.cuda.table import INSTANCES

WAITING = {(each.file, each.function): each for each in INSTANCES if each.waits}
OTHERS = {(each.file, each.function): each for each in INSTANCES if not each.waits}


def test_arguments_have_slots_of_their_own() -> None:
    first = (2**40, np.int32(-1), np.float32(0), np.int64(-5), np.uint32(1), np.uint64(2**63))
    arguments = Arguments(first)
    arguments.fill((2**41 + 3, np.int32(-7), np.float32(1.5), np.int64(-9), np.uint32(8), 2**63))
    kinds = "Q", "i", "f", "q", "I", "Q"
    found = [
        struct.unpack(kind, ctypes.string_at(place, struct.calcsize(kind)))[0]
        for kind, place in zip(kinds, arguments.places, strict=True)
    ]
    assert found == [2**41 + 3, -7, 1.5, -9, 8, 2**63]


def test_a_struct_among_arguments() -> None:
    kind = np.dtype([("at", "<u8"), ("count", "<i4"), ("rest", "<i4")])
    made = [np.array([(2**40 + i, i, -i)], kind) for i in (1, 2)]
    arguments = Arguments((np.int32(3), made[0], 2**50))
    arguments.fill((np.int32(4), made[1], 2**51))
    first, middle, last = arguments.places
    assert (middle - first, last - middle) == (8, 16)
    assert ctypes.string_at(middle, 16) == made[1].tobytes()
    assert ctypes.c_int32.from_address(first).value == 4
    assert ctypes.c_uint64.from_address(last).value == 2**51


@pytest.mark.slow
@pytest.mark.parametrize("instance", [*WAITING.values(), *OTHERS.values()], ids=lambda i: i.name)
def test_only_what_waits_may_start_early(instance: Instance) -> None:
    try:
        text = compiler.compile_instance(instance, "compute_90").decode()
    except nvrtc.NvrtcMissingError as missing:
        pytest.skip(str(missing))
    own = text.split(f".entry {instance.function}(")[1].split(".entry ")[0]
    assert ("griddepcontrol.wait" in own) == instance.waits
    assert instance.waits or "griddepcontrol.launch" not in own
