"""A Launcher that runs kernels on the CPU through emulate.h: the launchers' own code, no GPU.

Compiles an instance's source with g++ for the architecture that is asked for (70, 75 or 80).
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from voltapile.kernels.cuda.compile import source_of
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Kernel
from voltapile.kernels.cuda.submit import Arguments
from voltapile.shm.formats import row_bytes

HEADER = Path(__file__).with_name("emulate.h")
MORE = Path(__file__).with_name("emulate_attention.h")  # for what needs more than products
CLUSTER = Path(__file__).with_name("emulate_cluster.h")
BYTES = Path(__file__).with_name("emulate_bytes.h")
FLAGS = ("-std=c++20", "-O2", "-g0", "-w", "-shared", "-fPIC", "-ffp-contract=off")
SLACK = 256  # bytes behind a matrix that kernels may read


def has_compiler() -> bool:
    return shutil.which("g++") is not None


class EmulatedOps:
    """Memory is numpy's; kernels are compiled into `folder`."""

    multiprocessors = 4

    def __init__(self, arch: int, folder: Path, max_shared: int) -> None:
        self.arch, self.max_shared = arch, max_shared
        self._folder = folder
        self._kept: list[DeviceArray] = []
        self.launched: list[tuple[Instance, tuple[int, ...], int]] = []

    def kernel(self, instance: Instance) -> Kernel:
        library = self._library(instance)

        def call(grid: tuple[int, ...], block: int, args: tuple[Any, ...], shared: int = 0) -> None:
            self.launched.append((instance, grid, shared))
            assert shared <= self.max_shared, (instance.name, shared)
            if instance.waits:
                Arguments(args)  # what an early launch can take
            values = [np.int64(a) if isinstance(a, int) else a for a in args]
            cells = [np.array([value]) for value in values]
            array = (ctypes.c_void_p * len(cells))(*(cell.ctypes.data for cell in cells))
            wide = (*grid, 1)
            status = library.launch(int(wide[0]), int(wide[1]), block, shared, array)
            assert status == 0, f"{instance.name} wrote behind its shared memory"

        return call

    def scratch(self, shape: Sequence[int], dtype: Any = np.float32) -> DeviceArray:
        array = self.array(np.full(shape, 7, dtype))
        self._kept.append(array)
        return array

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        return self.array(np.zeros(shape, dtype))

    def constant(self, values: np.ndarray) -> DeviceArray:
        return self.array(values)

    def array(self, values: np.ndarray) -> DeviceArray:
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        memory = _aligned(raw.nbytes)
        memory[: raw.nbytes] = raw
        return DeviceArray(memory.ctypes.data, values.shape, values.dtype, memory)

    @contextmanager
    def scope(self) -> Iterator[None]:
        yield

    def product(
        self, weight: DeviceArray, x: DeviceArray, out: DeviceArray, factor: float, adds: bool
    ) -> None:
        """out [T, N] = or += factor * x [T, K] @ weight [N, K].T, halves in, float32 out."""
        a, b = (self.to_host(each).view(np.float16).astype(np.float64) for each in (x, weight))
        total = factor * (a @ b.T) + (self.to_host(out) if adds else 0)
        raw = (ctypes.c_uint8 * out.nbytes).from_address(out.ptr)
        np.frombuffer(raw, np.float32)[:] = total.astype(np.float32).reshape(-1)

    def weight(self, raw: np.ndarray, type_name: str, shape: tuple[int, ...]) -> CudaWeight:
        array = self.array(raw)
        row = row_bytes(type_name, shape[-1])
        return CudaWeight(shape, raw.nbytes, type_name, array.ptr, row, array)

    def to_host(self, x: DeviceArray) -> np.ndarray:
        raw = (ctypes.c_uint8 * x.nbytes).from_address(x.ptr)
        return np.frombuffer(raw, x.dtype).reshape(x.shape).copy()

    def _library(self, instance: Instance) -> ctypes.CDLL:
        text = re.sub(r"(?<!extern )__shared__", "static", source_of(instance.file))
        headers = [HEADER, MORE] if "__ldcg" in text else [HEADER]
        headers += [BYTES] if "mma_bytes" in text else []
        together = dict(instance.defines).get("SPLIT", "1")
        headers += [CLUSTER] if together != "1" else []
        included = "".join(f'#include "{each}"\n' for each in headers)
        source = f"{included}{text}\n" + (
            'extern "C" int launch(int x, int y, int threads, int shared, void** args) {\n'
            f"  return emulation::launch({instance.function}, x, y, threads, shared, args, "
            f"{together});\n}}\n"
        )
        defines = [f"-D{key}={value}" for key, value in instance.defines]
        defines.append(f"-DVP_ARCH={10 * self.arch}")
        known = "".join(each.read_text() for each in headers)
        key = hashlib.sha256((source + known + str(defines)).encode()).hexdigest()[:24]
        path = self._folder / f"{key}.so"
        if not path.exists():
            file = self._folder / f"{key}.cpp"
            file.write_text(source)
            subprocess.run(["g++", *FLAGS, *defines, str(file), "-o", str(path)], check=True)
        return ctypes.CDLL(str(path))


def _aligned(nbytes: int) -> np.ndarray:
    """uint8 at an address that 256 divides, with NaNs for what lies behind."""
    memory = np.full(nbytes + 256 + SLACK, 0xFF, np.uint8)
    start = -memory.ctypes.data % 256
    return memory[start : start + nbytes + SLACK]
