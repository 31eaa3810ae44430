"""Hands a model its tensors: bytes of the mapped file, in the backend's form, by GGUF name.

Knows files and Ops, not models. Tells how far loading is, as a fraction of the file's bytes.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from voltapile.kernels.ops import Ops, Weight
from voltapile.shm.gguf import Gguf
from voltapile.topology.memory import HUGE_PAGE, copied_size


class HugePages:
    """One piece of private memory that copies of tensors are put into, one behind another.

    Huge pages spare the processor most of its address look-ups: a step reads every weight once.
    """

    def __init__(self, nbytes: int) -> None:
        memory = mmap.mmap(-1, nbytes + HUGE_PAGE)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(memory, np.uint8)
        start = -array.ctypes.data % HUGE_PAGE
        self._free = array[start : start + nbytes]

    def copy(self, data: np.ndarray) -> np.ndarray:
        target, self._free = np.split(self._free, [copied_size(data.nbytes)])
        target[: data.nbytes] = data
        return target[: data.nbytes]


class FileWeights:
    """The Weights of workers/models/blocks.py over one file, for one rank that owns it all.

    pages: where tensors are copied to; without it they stay in the mapped file.
    """

    def __init__(
        self,
        gguf: Gguf,
        ops: Ops,
        progress: Callable[[float], None] = lambda fraction: None,
        pages: HugePages | None = None,
    ) -> None:
        self.gguf, self.ops, self.progress, self.pages = gguf, ops, progress, pages
        self.total = max(1, sum(tensor.nbytes for tensor in gguf.tensors.values()))
        self.done = 0

    def __call__(self, name: str) -> Weight:
        if name not in self.gguf.tensors:
            raise ValueError(f"{self.gguf.path}: tensor {name!r} is missing")
        return self._take(name, self.gguf.data(name), self.gguf.tensors[name].shape)

    def optional(self, name: str) -> Weight | None:
        return self(name) if self.has(name) else None

    def rows(self, name: str, start: int, stop: int) -> Weight | None:
        """Rows of a matrix or elements of a vector; None if there is no such tensor."""
        if not self.has(name):
            return None
        shape = self.gguf.tensors[name].shape
        if not 0 <= start < stop <= shape[0]:
            raise ValueError(f"{self.gguf.path}: {name!r} has {shape[0]} rows, not {stop}")
        data = self.gguf.data(name).reshape(shape[0], -1)[start:stop].reshape(-1)
        return self._take(name, data, (stop - start, *shape[1:]))

    def has(self, name: str) -> bool:
        return name in self.gguf.tensors

    def host(self, name: str) -> np.ndarray:
        """float32 values of a small tensor."""
        tensor = self.gguf.tensors[name]
        data = self.gguf.data(name).reshape(tensor.shape[0], -1)
        kind = GGMLQuantizationType[tensor.type_name]
        return np.asarray(dequantize(data, kind), np.float32).reshape(tensor.shape)

    def _take(self, name: str, data: np.ndarray, shape: tuple[int, ...]) -> Weight:
        if self.pages is not None:
            data = self.pages.copy(data)
            self.gguf.forget(name)
        weight = self.ops.weight(data, self.gguf.tensors[name].type_name, shape)
        self.done += data.nbytes
        self.progress(min(1.0, self.done / self.total))
        return weight


class DummyWeights(FileWeights):
    """Random values in the shapes of a file whose data are not there, for measurements."""

    def _take(self, name: str, data: np.ndarray, shape: tuple[int, ...]) -> Weight:
        make = getattr(self.ops, "dummy_weight", None)
        if make is None:
            raise ValueError(f"the {self.ops.name} backend makes no dummy weights")
        weight: Weight = make(self.gguf.tensors[name].type_name, shape)
        return weight
