"""A GPU for tests that need one, twice: with code for the card, and with the Volta source as PTX
that was compiled beforehand (--ptx DIR) and goes through the driver's own compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda.launch import DeviceArray

SCRATCH = 1 << 30


@pytest.fixture(scope="session", params=["native", "ptx"])
def cuda(request: pytest.FixtureRequest) -> Any:
    """A CudaOps for all tests."""
    pytest.importorskip("cupy")
    from voltapile.kernels.cuda.device import device_count
    from voltapile.kernels.cuda.ops import CudaOps

    if not device_count():
        pytest.skip("no GPU here")
    folder = request.config.getoption("--ptx")
    if request.param == "ptx" and not folder:
        pytest.skip("no --ptx folder")
    return CudaOps(0, SCRATCH, Path(folder) if request.param == "ptx" else None)


@pytest.fixture(autouse=True)
def _fresh_scratch(request: pytest.FixtureRequest) -> None:
    if "cuda" in request.fixturenames:
        request.getfixturevalue("cuda").reset_scratch()


@pytest.fixture
def put(cuda: Any) -> Callable[[np.ndarray], DeviceArray]:
    """put(values) -> a persistent array that holds them."""

    def make(values: np.ndarray) -> DeviceArray:
        array = cuda.zeros(values.shape, values.dtype)
        cuda.upload(array, values)
        return array

    return make
