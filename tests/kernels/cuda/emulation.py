"""A Launcher that runs kernels on the CPU through emulate.h: the launchers' own code, no GPU.

Compiles an instance's source with g++ for the architecture that is asked for (70, 75, 80 or 90).
What was compiled is kept under a digest of all that it is made of, from run to run.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from voltapile.kernels.cuda import tiles
from voltapile.kernels.cuda.compile import source_of
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Kernel
from voltapile.kernels.cuda.submit import Arguments
from voltapile.kernels.cuda.trail import Trail
from voltapile.shm.formats import row_bytes

HERE = Path(__file__).parent
HEADER, BELL, CLUSTER = (HERE / f"emulate{name}.h" for name in ("", "_bell", "_cluster"))
KNOWN = "".join(path.read_text() for path in sorted(HERE.glob("emulate*.h")))
FLAGS = (
    "-std=c++20", "-O1", "-g0", "-w", "-shared", "-fPIC",
    "-ffp-contract=off",  # products are rounded
)  # fmt: skip
FAILURES = {
    1: "wrote behind its shared memory",
    2: "has threads that wait for ever",
    3: "left copies",
}
SLACK = 256  # bytes behind a matrix that kernels may read


def has_compiler() -> bool:
    return shutil.which("g++") is not None


def compiled(source: str, defines: Sequence[str], folder: Path) -> ctypes.CDLL:
    """The library of a text that includes our headers; from `folder` where it is there."""
    flags = [*FLAGS, *native_flags(), *defines]
    parts = source, KNOWN, *flags, compiler_version()
    path = folder / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.so"
    if path.exists():
        path.touch()  # see conftest.py: what is not used any more is removed
    else:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            file, made = Path(own, "source.cpp"), Path(own, "made.so")
            file.write_text(source)
            command = ["g++", *flags, f"-I{HERE}", str(file), "-o", str(made)]
            subprocess.run(command, check=True)
            made.rename(path)
    return ctypes.CDLL(str(path))


@functools.cache
def native_flags() -> list[str]:
    """Halves are converted by the processor, where it can."""
    try:
        known = Path("/proc/cpuinfo").read_text()
    except OSError:
        known = ""
    has_all = platform.machine() == "x86_64" and " avx2 " in known and " f16c " in known
    return ["-march=x86-64-v3"] if has_all else []


@functools.cache
def compiler_version() -> str:
    return subprocess.check_output(["g++", "--version"], text=True)


class EmulatedOps:
    """Memory is numpy's; kernels are compiled into `folder`."""

    multiprocessors = 4
    tiles = True  # False: matrices lie row by row, as those that are not whole tiles

    def __init__(self, arch: int, folder: Path, max_shared: int) -> None:
        self.arch, self.max_shared = arch, max_shared
        self._folder = folder
        self._kept: list[DeviceArray] = []
        self.launched: list[tuple[Instance, tuple[int, ...], int]] = []
        self.arguments: list[tuple[Any, ...]] = []
        self.trail = Trail()
        self._library = functools.cache(self._compiled)

    def kernel(self, instance: Instance) -> Kernel:
        library = self._library(instance)

        def call(grid: tuple[int, ...], block: int, args: tuple[Any, ...], shared: int = 0) -> None:
            self.launched.append((instance, grid, shared))
            self.arguments.append(args)
            self.trail.add(0)
            assert shared <= self.max_shared, (instance.name, shared)
            if instance.waits:
                Arguments(args)  # what an early launch can take
            values = [np.int64(a) if isinstance(a, int) else a for a in args]
            cells = [np.array([value]) for value in values]
            array = (ctypes.c_void_p * len(cells))(*(cell.ctypes.data for cell in cells))
            wide = (*grid, 1)
            status = library.launch(int(wide[0]), int(wide[1]), block, shared, array)
            assert status == 0, f"{instance.name} {FAILURES[status]}"

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
        is_tiled = self.tiles and tiles.has_tiles(type_name, shape)
        own = tiles.in_tiles(raw.reshape(-1), type_name, shape[-1]) if is_tiled else raw
        array = self.array(own)
        row = row_bytes(type_name, shape[-1])
        return CudaWeight(shape, raw.nbytes, type_name, array.ptr, row, array, is_tiled)

    def to_host(self, x: DeviceArray) -> np.ndarray:
        raw = (ctypes.c_uint8 * x.nbytes).from_address(x.ptr)
        return np.frombuffer(raw, x.dtype).reshape(x.shape).copy()

    def _compiled(self, instance: Instance) -> ctypes.CDLL:
        text = re.sub(r"(?<!extern )__shared__", "static", source_of(instance.file))
        defines = dict(instance.defines)  # of a cluster the blocks, by either name
        together = defines.get("SPLIT", defines.get("CLUSTER", "1") if self.arch >= 90 else "1")
        headers = [HEADER, CLUSTER if together != "1" else BELL]
        included = "".join(f'#include "{each.name}"\n' for each in headers)
        source = f"{included}{text}\n" + (
            'extern "C" int launch(int x, int y, int threads, int shared, void** args) {\n'
            f"  return emulation::launch({instance.function}, x, y, threads, shared, args, "
            f"{together});\n}}\n"
        )
        flags = [f"-D{key}={value}" for key, value in defines.items()]
        return compiled(source, [*flags, f"-DVP_ARCH={10 * self.arch}"], self._folder)


def _aligned(nbytes: int) -> np.ndarray:
    """uint8 at an address that 256 divides, with NaNs for what lies behind."""
    memory = np.full(nbytes + 256 + SLACK, 0xFF, np.uint8)
    start = -memory.ctypes.data % 256
    return memory[start : start + nbytes + SLACK]
