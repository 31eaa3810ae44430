"""Hands a model its tensors: bytes of the mapped file, in the backend's form, by GGUF name.

Knows files and Ops, not models. Tells how far loading is, as a fraction of the file's bytes.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Self

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from voltapile.kernels.ops import Ops, Weight
from voltapile.shm import huge
from voltapile.shm.formats import row_bytes
from voltapile.shm.gguf import Gguf
from voltapile.topology.memory import HUGE_PAGE, copied_size
from voltapile.topology.parts import Part, Ranges, cut_of, part_of
from voltapile.topology.plan import Plan
from voltapile.topology.share import Range, Share
from voltapile.topology.spec import Spec

Progress = Callable[[float], None]
log = logging.getLogger(__name__)


class HugePages:
    """One piece of private memory that copies of tensors are put into, one behind another.

    Huge pages spare the processor most of its address look-ups: a step reads every weight once.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        memory = mmap.mmap(-1, nbytes + HUGE_PAGE)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        if fault := huge.private_fault():
            log.info("weights are copied to small pages, which are slower to read: %s", fault)
        array = np.frombuffer(memory, np.uint8)
        start = -array.ctypes.data % HUGE_PAGE
        self._free = array[start : start + nbytes]

    def copy(self, data: np.ndarray) -> np.ndarray:
        """data: uint8 of any layout."""
        assert copied_size(data.nbytes) <= self._free.nbytes, "more weights than planned"
        target, self._free = np.split(self._free, [copied_size(data.nbytes)])
        target[: data.nbytes].reshape(data.shape)[...] = data
        return target[: data.nbytes]


class FileWeights:
    """The Weights of workers/models/blocks.py over one file, for one rank.

    In host memory, columns that are cut out of rows are copied; everything is, if `copies_all`.
    The rest stays in the mapped file. What is_uploaded to a GPU is not held here any longer.
    """

    def __init__(
        self,
        gguf: Gguf,
        ops: Ops,
        spec: Spec,
        share: Share,
        progress: Progress = lambda fraction: None,
        pages: HugePages | None = None,
        copies_all: bool = False,
        is_uploaded: bool = False,
        shared: Mapping[str, np.ndarray] | None = None,
        staged: Collection[str] = (),
    ) -> None:
        self.shared, self.staged = shared or {}, staged
        self.gguf, self.ops, self.spec, self.share = gguf, ops, spec, share
        self.progress, self.pages, self.copies_all = progress, pages, copies_all
        self.is_uploaded = is_uploaded
        taken = [self._part(name).bytes for name in gguf.tensors if name not in staged]
        self.total = max(1, sum(taken))
        self.done = 0

    @classmethod
    def of_plan(
        cls,
        gguf: Gguf,
        ops: Ops,
        spec: Spec,
        plan: Plan,
        rank: int,
        progress: Progress,
        shared: Mapping[str, np.ndarray] | None = None,
    ) -> Self:
        """With memory for what the Plan copies. shared: bytes of what lies in host memory once for
        all ranks."""
        mine, tiers = plan.ranks[rank], {each.tier for each in plan.tensors.values()}
        copied = mine.memory["weights"] if "vram" not in tiers else 0
        pages = HugePages(copied) if copied else None
        own = "host" in tiers, "vram" in tiers
        return cls(gguf, ops, spec, mine.share, progress, pages, *own, shared, plan.staged)

    def __call__(self, name: str) -> Weight:
        if name not in self.gguf.tensors:
            raise ValueError(f"{self.gguf.path}: tensor {name!r} is missing")
        weight = self.optional(name)
        assert weight is not None, f"this rank has nothing of {name}"
        return weight

    def optional(self, name: str) -> Weight | None:
        found = self.fused(name)
        assert len(found) <= 1, f"{name} is several tensors in one"
        return found[0] if found else None

    def fused(self, name: str) -> tuple[Weight | None, ...]:
        if name not in self.gguf.tensors:
            return ()
        part = self._part(name)
        if part.columns[0] == part.columns[1] or part.experts[0] == part.experts[1]:
            return ()
        ranges = cut_of(name, self.spec, self.share).rows or part.rows
        if len(self.gguf.tensors[name].shape) == 3:
            return tuple(self._take_experts(name, part, rows) for rows in ranges)
        columns = part.column_parts
        return tuple(self._take(name, (rows,), columns) for rows in ranges if rows[0] < rows[1])

    def merged(self, name: str) -> Weight:
        """All rows of a tensor that this rank has, one behind another: copied, if they are not
        neighbours."""
        part = self._part(name)
        assert part.rows, f"this rank has nothing of {name}"
        return self._take(name, part.rows, part.column_parts)

    def stacked(self, names: Sequence[str]) -> Weight:
        """All rows that this rank has of some whole-columned tensors, one tensor behind another:
        copied, as float32 where the tensors are of several types."""
        missing = [name for name in names if name not in self.gguf.tensors]
        if missing:
            raise ValueError(f"{self.gguf.path}: tensor {missing[0]!r} is missing")
        if any(self._scale(name, ((),)) is not None for name in names):
            raise ValueError(f"{self.gguf.path}: {names[0]} has a scale, which has no use")
        kinds = {self.gguf.tensors[name].type_name for name in names}
        pieces = [self._rows_of(name, is_dense=len(kinds) > 1) for name in names]
        kind = kinds.pop() if len(kinds) == 1 else "F32"
        columns = self.gguf.tensors[names[0]].shape[1]
        weight = self._made(np.concatenate(pieces), kind, columns)
        for name in names if self.is_uploaded or self.pages is not None else ():
            self.gguf.forget(name)
        self._count(weight)
        return weight

    def _rows_of(self, name: str, is_dense: bool) -> np.ndarray:
        """uint8 [rows, bytes of one]; is_dense: as float32."""
        tensor, rows = self.gguf.tensors[name], self._part(name).rows
        if is_dense:
            data = np.ascontiguousarray(self.host(name)).view(np.uint8)
        else:
            data = self.gguf.data(name)
        return _taken(data.reshape(tensor.shape[0], -1), rows, 0)

    def _made(self, data: np.ndarray, type_name: str, columns: int) -> Weight:
        raw, shape = data.reshape(-1), (len(data), columns)
        if self.pages is not None:
            raw = self.pages.copy(raw)
        return self.ops.weight(raw, type_name, shape)

    def rows(self, name: str, ranges: Sequence[Range]) -> Weight | None:
        """Some of the rows that this rank has, copied."""
        if name not in self.gguf.tensors:
            return None
        return self._take(name, tuple(ranges), self._part(name).column_parts)

    def first_column(self, name: str) -> int:
        return self._part(name).columns[0]

    def host(self, name: str) -> np.ndarray:
        """float32 values of a small tensor."""
        tensor = self.gguf.tensors[name]
        data = self.gguf.data(name).reshape(tensor.shape[0], -1)
        kind = GGMLQuantizationType[tensor.type_name]
        return np.asarray(dequantize(data, kind), np.float32).reshape(tensor.shape)

    def _part(self, name: str) -> Part:
        return part_of(self.gguf.tensors[name], self.spec, self.share)

    def _take(self, name: str, rows: Ranges, columns: Ranges) -> Weight:
        tensor = self.gguf.tensors[name]
        shape = (length(rows), *tensor.shape[1:])
        is_cut = len(shape) > 1 and columns != ((0, shape[-1]),)
        if is_cut:
            shape = (*shape[:-1], length(columns))
        if name in self.staged:
            return self._staged(name)
        if name in self.shared:
            assert rows == ((0, tensor.shape[0]),), "what is shared is whole"
            weight = self._shared(name)
        else:
            weight = self._weight(name, shape, (rows, columns if is_cut else ()))
        self._count(weight)
        return weight

    def _shared(self, name: str) -> Weight:
        make, tensor = getattr(self.ops, "shared_weight", None), self.gguf.tensors[name]
        if make is None:
            raise ValueError(f"the {self.ops.name} backend reads no weights in shared memory")
        weight: Weight = make(self.shared[name], tensor.type_name, tensor.shape)
        return weight

    def _staged(self, name: str) -> Weight:
        """Of which nothing is read yet: it stays in the file."""
        make, tensor = getattr(self.ops, "file_weight", None), self.gguf.tensors[name]
        if make is None:
            raise ValueError(f"the {self.ops.name} backend reads no rows of a file")
        path = self.gguf.paths[tensor.shard]
        weight: Weight = make(path, tensor.offset, tensor.type_name, tensor.shape)
        return weight

    def _take_experts(self, name: str, part: Part, rows: Range) -> Weight:
        """Whole experts that are neighbours, of which nothing is copied but on request; or a part
        of each."""
        tensor = self.gguf.tensors[name]
        kept = (part.experts,), (rows,), part.column_parts
        cuts = tuple(
            () if ranges == ((0, size),) else ranges
            for ranges, size in zip(kept, tensor.shape, strict=True)
        )
        weight = self._weight(name, tuple(map(length, kept)), cuts)
        self._count(weight)
        return weight

    def _count(self, weight: Weight) -> None:
        self.done += weight.nbytes
        self.progress(min(1.0, self.done / self.total))

    def _weight(self, name: str, shape: tuple[int, ...], cuts: Sequence[Ranges]) -> Weight:
        """cuts: what is taken of each axis; (): all of it."""
        tensor, data = self.gguf.tensors[name], self.gguf.data(name)
        *axes, columns = cuts
        if any(axes) or columns:
            data = data.reshape(*tensor.shape[: len(axes)], -1)
        for axis, ranges in enumerate(axes):
            data = _taken(data, ranges, axis)
        kept = [tuple(row_bytes(tensor.type_name, edge) for edge in each) for each in columns]
        data = _taken(data, kept, len(axes))
        is_copied = columns or len(axes[0]) > 1 or any(axes[1:])
        if self.pages is not None and (is_copied or self.copies_all):
            data = self.pages.copy(data)
            self.gguf.forget(name)
        raw = np.ascontiguousarray(data).reshape(-1)
        scale = self._scale(name, cuts)
        if scale is None:
            weight = self.ops.weight(raw, tensor.type_name, shape)
        else:
            weight = self.ops.scaled_weight(  # type: ignore[attr-defined]
                raw, tensor.type_name, shape, scale
            )
        if self.is_uploaded:
            self.gguf.forget(name)
        return weight

    def _scale(self, name: str, cuts: Sequence[Ranges]) -> np.ndarray | None:
        """The factor of a tensor that the file has in another one; of each expert, if it has so
        many. None where it changes nothing."""
        other = f"{name.removesuffix('.weight')}.scale"
        if other not in self.gguf.tensors:
            return None
        found = self.host(other).reshape(-1)
        if not hasattr(self.ops, "scaled_weight"):
            raise ValueError(
                f"{self.gguf.path}: {name} has a scale, which the {self.ops.name} backend does not "
                "compute with yet"
            )
        return found if len(found) == 1 else _taken(found, cuts[0], 0)


def length(ranges: Ranges) -> int:
    return sum(end - begin for begin, end in ranges)


def _taken(data: np.ndarray, ranges: Sequence[Sequence[int]], axis: int) -> np.ndarray:
    """A view where one range is taken, or all."""
    if not ranges:
        return data
    before = (slice(None),) * axis
    pieces = [data[(*before, slice(*each))] for each in ranges]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis)


# Of a part of a tensor's name: what its values lie around, and how far off at most. Decays of
# delta nets are negative: else a state grows with each token until it is infinite, logits are NaN,
# and all tokens take the same experts.
AROUND = {
    "norm": (1.0, 0.1),
    "ssm_a": (-2.25, 1.75),
    "conv1d": (0.0, 0.5),
    "bias": (0.0, 0.02),
    "shexp": (0.0, 0.02),
}


class DummyWeights(FileWeights):
    """Random values in the shapes of a file whose data are not there, for measurements."""

    def _weight(self, name: str, shape: tuple[int, ...], cuts: Sequence[Ranges]) -> Weight:
        make = getattr(self.ops, "dummy_weight", None)
        if make is None:
            raise ValueError(f"the {self.ops.name} backend makes no dummy weights")
        around = next((values for part, values in AROUND.items() if part in name), None)
        weight: Weight = make(self.gguf.tensors[name].type_name, shape, around)
        return weight

    def _made(self, data: np.ndarray, type_name: str, columns: int) -> Weight:
        weight: Weight = self.ops.dummy_weight(type_name, (len(data), columns))  # type: ignore[attr-defined]
        return weight

    def _shared(self, name: str) -> Weight:
        weight: Weight = self.ops.fill(super()._shared(name))  # type: ignore[attr-defined]
        return weight
