"""Ops in C++: the thin Python side of the CPU backend.

Checks shapes, makes the output in scratch memory and hands both to the engine in _cpu, which runs
the computation at once or records it. Knows nothing of threads, instruction sets and formats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from voltapile.kernels.cpu import _cpu
from voltapile.kernels.cpu.collectives import CpuCollectives
from voltapile.kernels.cpu.scratch import Scratch, counted_bytes
from voltapile.kernels.cpu.weights import CpuWeight, bias_of, matrix_of, unpack, vector_of
from voltapile.kernels.ops import Arrived, Batch, SlotState, StepOutput, Weight, rope_store_in_parts
from voltapile.shm.formats import format_of

KV_TYPES = {"f16": (1, 2), "f32": (1, 4), "q8_0": (16, 18)}  # values, bytes of a block
OVERRUN = 128  # bytes that kernels may read past the last value
ACTIVATIONS = ("silu", "gelu_tanh")


@dataclass(eq=False)
class CpuKv:
    """Keys and values of one layer; how they lie in a page is told in csrc/kernels.h."""

    handle: _cpu.KvCache
    keys: np.ndarray  # uint8 [pages, bytes]
    values: np.ndarray
    kv_heads: int
    key_dim: int
    value_dim: int


class CpuGraph:
    """Recorded commands; owns the memory that they use."""

    def __init__(self, engine: _cpu.Engine) -> None:
        self._engine = engine
        self.recording: _cpu.Recording | None = None

    def replay(self) -> None:
        assert self.recording is not None, "the recording has not ended"
        self._engine.replay(self.recording)

    def __len__(self) -> int:
        assert self.recording is not None
        return len(self.recording)


class CpuOps(CpuCollectives):
    """See kernels/ops.py for the meaning of every method.

    threads: of which the caller is one. cpus: where they are pinned. heartbeat, abort: addresses of
    an int64 (CLOCK_MONOTONIC nanoseconds, written before each command) and of a uint32 (nonzero
    ends what runs with RuntimeError "aborted"); 0 is none.
    """

    name = "cpu"
    captures = True

    def __init__(
        self,
        threads: int,
        scratch_bytes: int,
        cpus: list[int] | None = None,
        heartbeat: int = 0,
        abort: int = 0,
    ) -> None:
        assert threads >= 1, threads
        self.taken = Counter(scratch=scratch_bytes)
        self._scratch = Scratch(scratch_bytes)
        self._heartbeat = heartbeat
        self._engine = _cpu.Engine(threads, cpus or [], heartbeat, abort)

    @property
    def scratch_peak(self) -> int:
        """The most scratch bytes that were in use at once."""
        return self._scratch.peak

    # --- memory ---------------------------------------------------------------------------
    def weight(self, data: np.ndarray, type_name: str, shape: tuple[int, ...]) -> CpuWeight:
        return self._weight(data, type_name, shape, None)

    def scaled_weight(
        self, data: np.ndarray, type_name: str, shape: tuple[int, ...], scale: np.ndarray
    ) -> CpuWeight:
        """A matrix whose file has a factor of it in another tensor; of each expert, if it has so
        many."""
        assert len(shape) > 1, "a vector has no factor"
        factors = np.broadcast_to(scale, shape[0] if len(shape) > 2 else 1)
        return self._weight(data, type_name, shape, factors.astype(np.float32))

    def _weight(
        self, data: np.ndarray, type_name: str, shape: tuple[int, ...], factors: np.ndarray | None
    ) -> CpuWeight:
        kind = format_of(type_name)
        if not _cpu.is_supported(kind.id):
            raise ValueError(f"the cpu backend has no tensor type {type_name}")
        assert data.dtype == np.uint8, data.dtype
        rows = int(np.prod(shape[:-1], dtype=np.int64))
        assert data.nbytes == rows * shape[-1] // kind.block_len * kind.block_bytes, (
            f"{data.nbytes} bytes for {type_name} {shape}"
        )
        if len(shape) > 1:
            matrix = _cpu.Matrix(data.reshape(-1), kind.id, rows, shape[-1], factors)
            return CpuWeight(tuple(shape), data.nbytes, matrix, None, data, kind.id, factors)
        vector = data.view(np.float32) if type_name == "F32" else unpack(data, kind.id, shape[0])
        return CpuWeight(tuple(shape), vector.nbytes, vector=vector)

    def weight_rows(self, weight: Weight, start: int, stop: int) -> CpuWeight:
        assert isinstance(weight, CpuWeight)
        assert weight.data is not None, "a vector where a matrix is needed"
        data = weight.data.reshape(weight.shape[0], -1)[start:stop].reshape(-1)
        shape, kind, factors = (stop - start, weight.shape[1]), weight.kind, weight.factors
        matrix = _cpu.Matrix(data, kind, *shape, factors)
        return CpuWeight(shape, 0, matrix, None, data, kind, factors)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return self._counted(shape, dtype, "slots")

    def _counted(self, shape: tuple[int, ...], dtype: Any, purpose: str) -> np.ndarray:
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return np.ndarray(shape, dtype, counted_bytes(self.taken, purpose, nbytes))

    def kv_cache(
        self,
        pages: int,
        kv_heads: int,
        page_tokens: int,
        key_dim: int,
        value_dim: int,
        key_type: str,
        value_type: str,
    ) -> CpuKv:
        key_bytes = kv_heads * _cpu.kv_pitch(page_tokens) * _kv_bytes(key_type, key_dim)
        value_bytes = kv_heads * page_tokens * _kv_bytes(value_type, value_dim)
        keys = counted_bytes(self.taken, "kv", pages * key_bytes)
        values = counted_bytes(self.taken, "kv", pages * value_bytes + OVERRUN)
        handle = _cpu.KvCache(
            keys, values, pages, kv_heads, page_tokens, key_dim, value_dim, key_type, value_type
        )
        return CpuKv(
            handle,
            keys.reshape(pages, key_bytes),
            values[: pages * value_bytes].reshape(pages, value_bytes),
            kv_heads,
            key_dim,
            value_dim,
        )

    def copy_page(self, cache: CpuKv, source: int, target: int) -> None:
        cache.keys[target] = cache.keys[source]
        cache.values[target] = cache.values[source]

    def scope(self) -> AbstractContextManager[None]:
        return self._scratch.scope()

    def reset_scratch(self) -> None:
        self._scratch.reset()

    def upload(self, target: np.ndarray, values: np.ndarray) -> None:
        assert target.flags.c_contiguous
        assert values.size <= target.size, (values.shape, target.shape)
        target.reshape(-1)[: values.size] = values.reshape(-1)

    def to_host(self, x: np.ndarray) -> np.ndarray:
        return x.copy()

    def fetch(self, arrays: Sequence[np.ndarray]) -> Arrived:
        return Arrived([array.copy() for array in arrays])

    @contextmanager
    def capture(self) -> Iterator[CpuGraph]:
        graph = CpuGraph(self._engine)
        self._engine.record()
        try:
            yield graph
        finally:
            graph.recording = self._engine.recorded()

    def prepare(self, run: Callable[[], None]) -> None:
        pass

    def synchronize(self) -> None:
        pass

    # --- the ends of a step ---------------------------------------------------------------
    def begin(self, batch: Batch, state: SlotState) -> None:
        self._engine.begin(batch, state)

    def sample(self, logits: np.ndarray, batch: Batch, state: SlotState, out: StepOutput) -> None:
        rows = len(batch.outputs)
        assert logits.ndim == 2, logits.shape
        assert len(logits) == rows, (logits.shape, rows)
        arrays = (out.tokens, out.finish, out.logprob_ids, out.logprobs)
        assert min(map(len, arrays)) >= rows, rows
        assert out.logprob_ids.shape == out.logprobs.shape, out.logprobs.shape
        with self._scratch.scope():
            self._engine.sample(logits, batch, state, out, self._scratch.array(logits.shape))

    # --- models ---------------------------------------------------------------------------
    def embed(self, table: Weight, tokens: np.ndarray, scale: float = 1.0) -> np.ndarray:
        out = self._scratch.array((len(tokens), table.shape[1]))
        self._engine.embed(matrix_of(table), tokens, out, scale)
        return out

    def rms_norm(
        self, x: np.ndarray, weight: Weight, eps: float, add_to: np.ndarray | None = None
    ) -> np.ndarray:
        assert x.shape[-1] % weight.shape[0] == 0, (x.shape, weight.shape)
        assert add_to is None or add_to.shape == x.shape, (add_to.shape, x.shape)
        out = self._scratch.array(x.shape) if add_to is None else add_to
        self._engine.rms_norm(x, vector_of(weight), out, eps, add_to is not None)
        return out

    def softcap_(self, x: np.ndarray, cap: float) -> np.ndarray:
        assert cap > 0, cap
        self._engine.softcap(x, cap)
        return x

    def linear(
        self,
        x: np.ndarray,
        weight: Weight,
        bias: Weight | None = None,
        add_to: np.ndarray | None = None,
    ) -> np.ndarray:
        if add_to is None:
            return self.linears(x, (weight,), (bias,))[0]
        assert add_to.shape == (len(x), weight.shape[0]), (add_to.shape, x.shape, weight.shape)
        self._linears(x, (weight,), (bias,), (add_to,), True)
        return add_to

    def linears(
        self, x: np.ndarray, weights: Sequence[Weight], biases: Sequence[Weight | None]
    ) -> tuple[np.ndarray, ...]:
        outs = tuple(self._scratch.array((len(x), weight.shape[0])) for weight in weights)
        self._linears(x, weights, biases, outs, False)
        return outs

    def glu(
        self,
        x: np.ndarray,
        gate: Weight,
        up: Weight,
        activation: str,
        gate_bias: Weight | None = None,
        up_bias: Weight | None = None,
    ) -> np.ndarray:
        assert gate.shape == up.shape, (gate.shape, up.shape)
        assert x.shape[1:] == gate.shape[1:], (x.shape, gate.shape)
        assert activation in ACTIVATIONS, activation
        out = self._scratch.array((len(x), gate.shape[0]))
        with self._scratch.scope():
            self._engine.glu(
                x,
                len(x),
                matrix_of(gate),
                matrix_of(up),
                bias_of(gate_bias, gate),
                bias_of(up_bias, up),
                activation == "gelu_tanh",
                out,
                self._quantised(x),
            )
        return out

    def rope_angles(self, positions: np.ndarray, inv_freq: np.ndarray, scale: float) -> np.ndarray:
        out = self._scratch.array((len(positions), len(inv_freq), 2))
        self._engine.rope_angles(positions, np.ascontiguousarray(inv_freq, np.float32), out, scale)
        return out

    def rope_(self, x: np.ndarray, angles: np.ndarray, head_dim: int, layout: str) -> np.ndarray:
        assert layout in ("norm", "neox"), layout
        assert len(x) == len(angles), (x.shape, angles.shape)
        assert x.size == len(x) * (x.size // max(1, len(x)) // head_dim) * head_dim, x.shape
        assert 2 * angles.shape[1] <= head_dim, (angles.shape, head_dim)
        self._engine.rope(x, angles, head_dim, layout == "neox")
        return x

    def store_kv(
        self, cache: CpuKv, k: np.ndarray, v: np.ndarray, batch: Batch, group: int
    ) -> None:
        tokens = len(batch.slots)
        assert k.size == tokens * cache.kv_heads * cache.key_dim, (k.shape, tokens)
        assert v.size == tokens * cache.kv_heads * cache.value_dim, (v.shape, tokens)
        self._engine.store_kv(cache.handle, k, v, batch.slots, batch.positions, batch.pages[group])

    def rope_store(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        angles: np.ndarray,
        layout: str,
        cache: CpuKv,
        batch: Batch,
        group: int,
        eps: float = 0.0,
        q_norm: Weight | None = None,
        k_norm: Weight | None = None,
    ) -> np.ndarray:
        norms, store, dim = (q_norm, k_norm), (cache, batch, group), cache.key_dim
        vectors = q, k, v
        out: np.ndarray = rope_store_in_parts(self, vectors, angles, layout, store, eps, norms, dim)
        return out

    def attention(
        self,
        q: np.ndarray,
        cache: CpuKv,
        batch: Batch,
        group: int,
        head_map: Sequence[int],
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> np.ndarray:
        return self._attend(q, cache, batch, group, head_map, scale, window, softcap, None)

    def _attend(
        self,
        q: np.ndarray,
        cache: CpuKv,
        batch: Batch,
        group: int,
        head_map: Sequence[int],
        scale: float,
        window: int,
        softcap: float,
        weights: np.ndarray | None,
    ) -> np.ndarray:
        tokens, heads = len(batch.slots), len(head_map)
        assert q.size == tokens * heads * cache.key_dim, (q.shape, tokens, heads)
        out = self._scratch.array((tokens, heads * cache.value_dim))
        self._engine.attention(
            q,
            out,
            cache.handle,
            batch.slots,
            batch.positions,
            batch.pages[group],
            head_map,
            scale,
            window,
            softcap,
            weights,
        )
        return out

    def gather(self, x: np.ndarray, index: np.ndarray) -> np.ndarray:
        out = self._scratch.array((len(index), *x.shape[1:]))
        self._engine.gather(x, index, out, x.shape[1])
        return out

    def copy(self, x: np.ndarray) -> np.ndarray:
        out = self._scratch.array(x.shape)
        self._engine.gather(x, None, out, x.shape[-1])
        return out

    # --- private --------------------------------------------------------------------------
    def _linears(
        self,
        x: np.ndarray,
        weights: Sequence[Weight],
        biases: Sequence[Weight | None],
        outs: Sequence[np.ndarray],
        accumulate: bool,
    ) -> None:
        for weight in weights:
            assert weight.shape[1:] == x.shape[1:], (x.shape, weight.shape)
        vectors = [bias_of(b, w) for b, w in zip(biases, weights, strict=True)]
        matrices = [matrix_of(weight) for weight in weights]
        with self._scratch.scope():
            self._engine.linears(x, len(x), matrices, vectors, outs, accumulate, self._quantised(x))

    def _quantised(self, x: np.ndarray) -> np.ndarray:
        """Scratch for x in the form that products take. It may be given back as soon as the
        command is recorded: commands run in order, and only this one uses it."""
        return self._scratch.array((_cpu.quantised_bytes(*x.shape),), np.uint8)


def _kv_bytes(kv_type: str, dim: int) -> int:
    """Bytes of one head at one position."""
    if kv_type not in KV_TYPES:
        raise ValueError(f"cache type {kv_type!r}; the cpu backend has {', '.join(KV_TYPES)}")
    length, nbytes = KV_TYPES[kv_type]
    if dim % length:
        raise ValueError(f"cache type {kv_type}: heads of {dim} are no multiple of {length}")
    return dim // length * nbytes
