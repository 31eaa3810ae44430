"""A GPU for tests that need one, twice: with code for the card, and with the Volta source as PTX
that was compiled beforehand (--ptx DIR) and goes through the driver's own compiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda.launch import DeviceArray
from voltapile.shm.gguf import Gguf
from voltapile.workers.engine import Engine

SCRATCH = 1 << 30


@pytest.fixture(scope="session", params=["native", "ptx"])
def ptx(request: pytest.FixtureRequest) -> Path | None:
    """The folder of PTX to run; None: code for this card."""
    pytest.importorskip("cupy")
    from voltapile.kernels.cuda.device import device_count

    if not device_count():
        pytest.skip("no GPU here")
    folder = request.config.getoption("--ptx")
    if request.param == "native":
        return None
    if not folder:
        pytest.skip("no --ptx folder")
    return Path(folder)


@pytest.fixture(scope="session")
def cuda(ptx: Path | None) -> Any:
    """A CudaOps for all tests."""
    from voltapile.kernels.cuda.ops import CudaOps

    return CudaOps(0, SCRATCH, ptx)


@pytest.fixture
def cuda_engine(ptx: Path | None, plan_for: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """cuda_engine(path, **Options fields) -> a loaded Engine."""
    from voltapile.kernels.cuda.family_ops import CudaFamilyOps

    with contextlib.ExitStack() as stack:

        def make(path: Path, **options: Any) -> Engine:
            plan = plan_for(path, "cuda", **options)
            gguf = stack.enter_context(Gguf.open(path))
            ops = CudaFamilyOps(0, plan.ranks[0].memory["scratch"], ptx)
            stack.callback(ops.close)
            engine = Engine(plan, ops, gguf)
            engine.load()
            return engine

        yield make


@pytest.fixture(autouse=True)
def _fresh_scratch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Also ends the threads that upload."""
    if "cuda" not in request.fixturenames:
        yield
        return
    ops = request.getfixturevalue("cuda")
    ops.reset_scratch()
    yield
    ops.prepare(lambda: None)


@pytest.fixture
def put(cuda: Any) -> Callable[[np.ndarray], DeviceArray]:
    """put(values) -> a persistent array that holds them."""

    def make(values: np.ndarray) -> DeviceArray:
        array = cuda.zeros(values.shape, values.dtype)
        cuda.upload(array, values)
        return array

    return make
