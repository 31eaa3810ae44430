"""Ops in CUDA: owns one GPU's stream, scratch memory and loaded kernels.

What to launch is written in the launcher modules (rows, sampling, matmul, attention). Knows no
model, and of a batch only where its arrays are.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from voltapile.kernels.cuda import attention, dummy, heads, matmul, rows, sampling, tiles
from voltapile.kernels.cuda.chunks import REPACKED
from voltapile.kernels.cuda.collectives import CudaCollectives
from voltapile.kernels.cuda.device import Device
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Kernel, Launcher
from voltapile.kernels.cuda.loader import Loader
from voltapile.kernels.cuda.matmul import CUBLAS_FROM, EVERY_ROW_ALONE, FUSED_FROM, Policy
from voltapile.kernels.cuda.memory import Blocks, Constants, Courier, Ring, Scratch, Uploader
from voltapile.kernels.cuda.pinning import Pinned
from voltapile.kernels.cuda.positions import CudaPositions
from voltapile.kernels.cuda.repack import repacked
from voltapile.kernels.cuda.wires import open_links
from voltapile.kernels.group import Group
from voltapile.kernels.ops import Arrival, Batch, SlotState, StepOutput, Weight
from voltapile.shm.formats import row_bytes

SLACK = 256  # bytes behind the last row of a matrix that kernels may read


class CudaGraph:
    """A recorded step; the scratch addresses in it stay valid."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.recorded: list[Any] = []

    def replay(self) -> None:
        assert self.recorded, "the recording has not ended"
        self._device.replay(self.recorded[0])


class CudaOps(CudaPositions, CudaCollectives):
    """See kernels/ops.py for the meaning of every method.

    number: of the GPU. choices: a Plan's. ptx: a folder of PTX to run instead of this card's code.
    """

    name = "cuda"
    captures = True

    def __init__(
        self,
        number: int,
        scratch_bytes: int,
        ptx: Path | None = None,
        choices: Mapping[str, str] | None = None,
    ) -> None:
        self.device = Device(number)
        self.trail = self.device.trail
        self._loader = Loader(self.device, ptx)
        self.multiprocessors, self.arch = self.device.multiprocessors, self._loader.arch
        found = choices or {}
        self._policy = Policy(
            fused_from=int(found.get("fused_from", FUSED_FROM)),
            cublas_from=int(found.get("cublas_from", CUBLAS_FROM)),
        )
        self._step = (-1, 0)  # tokens of the step that began, and how many of them are generated
        self._scratch = Scratch(self.device, scratch_bytes)
        self._weights, self._uploader = Blocks(self.device, "weights"), Uploader(self.device)
        self._arrays = Blocks(self.device, "caches and slots")
        self._ring, self._courier = Ring(self.device), Courier(self.device)
        self._constants, self._dummies = Constants(self.device), 0

    @property
    def taken(self) -> Counter[str]:
        return self.device.taken

    @property
    def scratch_peak(self) -> int:
        """The most scratch bytes that were in use at once."""
        return self._scratch.peak

    # --- what launchers use (launch.Launcher) -------------------------------------------------
    def kernel(self, instance: Instance) -> Kernel:
        self._catch_up()
        return self._loader.kernel(instance)

    def scratch(self, shape: tuple[int, ...], dtype: Any = np.float32) -> DeviceArray:
        return self._scratch.array(shape, dtype)

    def constant(self, values: np.ndarray) -> DeviceArray:
        return self._constants.array(values)

    def product(
        self, weight: DeviceArray, x: DeviceArray, out: DeviceArray, factor: float, adds: bool
    ) -> None:
        (rows, columns), tokens = weight.shape, len(x)
        assert x.shape == (tokens, columns), (x, weight)
        assert out.shape == (tokens, rows), (out, weight)
        self._catch_up()
        if self._loader.is_rehearsing:
            self.device.open_library()
        else:
            shape = tokens, rows, columns
            self.device.product(weight.ptr, x.ptr, out.ptr, shape, factor, adds)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        nbytes = DeviceArray(0, shape, dtype).nbytes
        ptr, owner = self._arrays.take(nbytes)
        self.device.clear(ptr, nbytes)
        return DeviceArray(ptr, shape, dtype, owner)

    def scope(self) -> AbstractContextManager[None]:
        return self._scratch.scope()

    # --- memory -------------------------------------------------------------------------------
    def weight(self, data: np.ndarray, type_name: str, shape: tuple[int, ...]) -> CudaWeight:
        assert data.dtype == np.uint8, data.dtype
        if len(shape) == 1:
            data, type_name = rows.vector(data, type_name).reshape(-1).view(np.uint8), "F32"
        elif type_name in REPACKED:
            return self.scaled_weight(data, type_name, shape, np.ones(1, np.float32))
        return self._uploaded([data.reshape(-1)], type_name, shape)

    def scaled_weight(
        self, data: np.ndarray, type_name: str, shape: tuple[int, ...], scale: np.ndarray
    ) -> CudaWeight:
        """scale: factors that the file has apart, of the matrix or of each expert."""
        if type_name not in REPACKED:
            raise ValueError(f"the cuda backend knows no factors of {type_name}")
        return self._uploaded(repacked(data, type_name, scale), REPACKED[type_name], shape)

    def _uploaded(
        self, pieces: Iterable[np.ndarray], type_name: str, shape: tuple[int, ...]
    ) -> CudaWeight:
        if type_name not in rows.EMBED:
            raise ValueError(f"the cuda backend has no tensor type {type_name}")
        weight, sent = self._place(type_name, shape), 0
        for piece in pieces:
            if weight.is_tiled:
                piece = tiles.in_tiles(piece, type_name, shape[-1])
            self._uploader.send(weight.ptr + sent, piece)
            sent += piece.nbytes
        assert sent == weight.nbytes, f"{sent} bytes for {type_name} {shape}"
        return weight

    def _place(self, type_name: str, shape: tuple[int, ...]) -> CudaWeight:
        row = row_bytes(type_name, shape[-1])
        nbytes = row * int(np.prod(shape[:-1], dtype=np.int64))
        ptr, owner = self._weights.take(nbytes + SLACK)
        is_tiled = tiles.has_tiles(type_name, shape)
        return CudaWeight(tuple(shape), nbytes, type_name, ptr, row, owner, is_tiled)

    def shared_weight(
        self, memory: np.ndarray, type_name: str, shape: tuple[int, ...]
    ) -> CudaWeight:
        """A matrix in page-locked host memory, for whoever reads few of its rows. memory: its
        bytes, from a page's beginning on; the array stays."""
        row, pinned = row_bytes(type_name, shape[-1]), Pinned(self.device, memory)
        assert memory.nbytes == row * int(np.prod(shape[:-1], dtype=np.int64)), shape
        return CudaWeight(tuple(shape), memory.nbytes, type_name, pinned.address, row, pinned)

    def weight_rows(self, weight: Weight, start: int, stop: int) -> CudaWeight:
        assert isinstance(weight, CudaWeight)
        assert not weight.is_tiled or (start | stop) % tiles.ROWS == 0, (start, stop)
        shape = stop - start, weight.shape[1]
        return replace(weight, shape=shape, nbytes=0, ptr=weight.ptr + start * weight.row_bytes)

    def dummy_weight(
        self, type_name: str, shape: tuple[int, ...], around: tuple[float, float] | None = None
    ) -> CudaWeight:
        """Random values instead of a file's, for measurements; around: dummy.fill's."""
        type_name = "F32" if len(shape) == 1 else REPACKED.get(type_name, type_name)
        return self.fill(self._place(type_name, shape), around)

    def fill(self, weight: CudaWeight, around: tuple[float, float] | None = None) -> CudaWeight:
        """Random values over its own; the same on every rank that makes the same calls."""
        self._dummies += 1
        dummy.fill(self, weight, self._dummies, around)
        return weight

    def kv_cache(
        self,
        pages: int,
        kv_heads: int,
        page_tokens: int,
        key_dim: int,
        value_dim: int,
        key_type: str,
        value_type: str,
    ) -> Any:
        return attention.kv_cache(
            self, pages, kv_heads, page_tokens, key_dim, value_dim, key_type, value_type
        )

    def copy_page(self, cache: Any, source: int, target: int) -> None:
        self._catch_up()
        for array in attention.page_parts(cache):
            self.device.copy(array[target].ptr, array[source].ptr, array[source].nbytes)

    def reset_scratch(self) -> None:
        self._scratch.reset()
        self._norms.forget()
        self._step = (-1, 0)

    def upload(self, target: DeviceArray, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values, target.dtype)
        assert values.size <= target.size, (values.shape, target.shape)
        self._catch_up()
        self._ring.send(target.ptr, values.reshape(-1).view(np.uint8))

    def to_host(self, x: DeviceArray) -> np.ndarray:
        self._catch_up()
        out = np.empty(x.shape, x.dtype)
        self._ring.fetch(x.ptr, out.reshape(-1).view(np.uint8))
        self._check_group()
        return out

    def fetch(self, arrays: Sequence[DeviceArray]) -> Arrival:
        self._catch_up()
        tell = functools.partial(sampling.tell, self)
        return self._watched(self._courier.fetch(arrays, tell))

    @contextmanager
    def capture(self) -> Iterator[CudaGraph]:
        graph = CudaGraph(self.device)
        with self.device.capture() as graph.recorded:
            yield graph
            self._catch_up()

    def prepare(self, run: Callable[[], None]) -> None:
        """Compile and load, side by side, what `run` launches; it is called and launches nothing.
        Then give back what only loading needed."""
        with self._loader.rehearse():
            run()
            self.kernel(sampling.TELL)  # also catches up
        self._uploader.close()

    def synchronize(self) -> None:
        self._catch_up()
        self.device.synchronize()
        self._check_group()

    def join(self, group: Group) -> None:
        """If it raises, this Ops is in no group: whoever wanted one cannot go on with it."""
        self._links = None  # an earlier group's memory is given back first
        self._links = open_links(self, group)

    def _launcher(self) -> Launcher:
        return self

    def _exact_rows(self, rows: int) -> int:
        policy = self._policy_for_rows(rows)
        exact = min(rows, policy.generated)
        return rows if policy.way(rows - exact) == "rows" else exact

    # --- the ends of a step -------------------------------------------------------------------
    def begin(self, batch: Batch, state: SlotState) -> None:
        self._step = len(batch.tokens), batch.generated
        sampling.begin(self, batch, state)

    def sample(self, logits: DeviceArray, batch: Batch, state: SlotState, out: StepOutput) -> None:
        with self.scope():
            sampling.sample(self, logits, batch, state, out)

    # --- models -------------------------------------------------------------------------------
    def embed(self, table: Weight, tokens: DeviceArray, scale: float = 1.0) -> DeviceArray:
        return rows.embed(self, _own(table), tokens, scale)

    def softcap_(self, x: DeviceArray, cap: float) -> DeviceArray:
        return rows.softcap_(self, x, cap)

    def linear(
        self,
        x: DeviceArray,
        weight: Weight,
        bias: Weight | None = None,
        add_to: DeviceArray | None = None,
    ) -> DeviceArray:
        own, own_bias, policy = _own(weight), _or_none(bias), self._policy_for(x)
        if add_to is None:
            is_fused = policy.way(len(x)) == "fused"
            if (late := self._product_late(x, own, own_bias, is_fused)) is not None:
                return late
        self._changes(add_to, x)
        return matmul.linear(self, x, own, own_bias, add_to, policy)

    def linears(
        self,
        x: DeviceArray,
        weights: Sequence[Weight],
        biases: Sequence[Weight | None],
    ) -> tuple[DeviceArray, ...]:
        own = [_own(weight) for weight in weights]
        return matmul.linears(self, x, own, [_or_none(b) for b in biases], self._policy_for(x))

    def glu(
        self,
        x: DeviceArray,
        gate: Weight,
        up: Weight,
        activation: str,
        gate_bias: Weight | None = None,
        up_bias: Weight | None = None,
    ) -> DeviceArray:
        return matmul.glu(
            self,
            x,
            _own(gate),
            _own(up),
            activation,
            _or_none(gate_bias),
            _or_none(up_bias),
            self._policy_for(x),
        )

    def rope_angles(
        self, positions: DeviceArray, inv_freq: np.ndarray, scale: float
    ) -> DeviceArray:
        return rows.rope_angles(self, positions, inv_freq, scale)

    def rope_(self, x: DeviceArray, angles: DeviceArray, head_dim: int, layout: str) -> DeviceArray:
        return rows.rope_(self, x, angles, head_dim, layout)

    def store_kv(
        self, cache: Any, k: DeviceArray, v: DeviceArray, batch: Batch, group: int
    ) -> None:
        attention.store_kv(self, cache, k, v, batch, group)

    def rope_store(
        self,
        q: DeviceArray,
        k: DeviceArray,
        v: DeviceArray,
        angles: DeviceArray,
        layout: str,
        cache: Any,
        batch: Batch,
        group: int,
        eps: float = 0.0,
        q_norm: Weight | None = None,
        k_norm: Weight | None = None,
    ) -> DeviceArray:
        norms = _or_none(q_norm), _or_none(k_norm)
        return heads.rope_store(self, q, k, v, angles, layout, cache, batch, group, eps, norms)

    def attention(
        self,
        q: DeviceArray,
        cache: Any,
        batch: Batch,
        group: int,
        head_map: Sequence[int],
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> DeviceArray:
        return attention.attention(self, q, cache, batch, group, head_map, scale, window, softcap)

    def gather(self, x: DeviceArray, index: DeviceArray) -> DeviceArray:
        self._step = (0, 0)  # what follows is the end of a step: see _policy_for_rows
        return rows.gather(self, x, index)

    def copy(self, x: DeviceArray) -> DeviceArray:
        self._catch_up()
        out = self.scratch(x.shape, x.dtype)
        if not self._loader.is_rehearsing:
            self.device.copy(out.ptr, x.ptr, x.nbytes)
        return out

    def _policy_for(self, x: DeviceArray) -> Policy:
        return self._policy_for_rows(len(x))

    def _policy_for_rows(self, rows: int) -> Policy:
        """Only prompt rows may take the product of many rows. What has not as many rows as the
        step has tokens is its sampled rows, and takes none; nor do a prompt's probabilities, for
        the Plan has no room for a whole output matrix of halves."""
        tokens, generated = self._step
        if tokens < 0:  # no step began
            return self._policy
        if rows != tokens:
            return EVERY_ROW_ALONE
        return replace(self._policy, generated=generated)


def _own(weight: Weight) -> CudaWeight:
    assert isinstance(weight, CudaWeight)
    return weight


def _or_none(weight: Weight | None) -> CudaWeight | None:
    return None if weight is None else _own(weight)
