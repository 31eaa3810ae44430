"""What launchers see works on any computer: views of device arrays, names of instances."""

from __future__ import annotations

import numpy as np
import pytest
from voltapile.kernels.cuda.launch import DeviceArray, Instance


def array(*shape: int) -> DeviceArray:
    return DeviceArray(1000, shape, np.int32)


@pytest.mark.parametrize("key", [0, -1, 2, slice(1, 3), slice(2, None), (1, 2), (2, slice(1, 3))])
def test_views_lie_where_numpy_says(key: object) -> None:
    host = np.zeros((3, 4, 5), np.int32)
    view, expected = array(3, 4, 5)[key], host[key]  # type: ignore[index]
    offset = expected.ctypes.data - host.ctypes.data
    assert (view.ptr, view.shape, view.nbytes) == (1000 + offset, expected.shape, expected.nbytes)


def test_views_stay_inside() -> None:
    with pytest.raises(IndexError):
        array(3)[3]
    with pytest.raises(AssertionError):
        array(3)[::2]
    assert array(3)[5:9].size == 0
    assert array(0, 4)[0:0].shape == (0, 4)


def test_reshape() -> None:
    assert array(3, 4).reshape(-1, 2).shape == (6, 2)
    with pytest.raises(AssertionError):
        array(3, 4).reshape(5, 2)


def test_names_of_instances() -> None:
    assert Instance("a.cu", "f").name == "f"
    assert Instance("a.cu", "f", (("FORMAT", "Q4_K"), ("ROWS", "8"))).name == (
        "f[FORMAT=Q4_K,ROWS=8]"
    )
