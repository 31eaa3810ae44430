"""Ops in plain numpy: the truth that the other backends are tested against.

Every method is the shortest correct statement of what kernels/ops.py asks for, in float32 as the
original models are written; weights are dequantised whole and kept while a byte budget lasts.
It knows nothing of speed: no scratch memory, no capture, key and value caches always in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from voltapile.kernels.ops import (
    Array,
    Arrived,
    Batch,
    Graph,
    SlotState,
    StepOutput,
    Weight,
    rope_store_in_parts,
)
from voltapile.kernels.reference.collectives import ReferenceCollectives
from voltapile.kernels.reference.ragged import rows_of
from voltapile.kernels.reference.sampling import sample

KEEP_BYTES = 4 << 30  # dequantised weights that are kept


@dataclass(eq=False)
class ReferenceWeight:
    """A tensor as it lies in the file; dense is its float32 form once it is kept."""

    data: np.ndarray  # uint8, one row of bytes for each row of the matrix
    type_name: str
    shape: tuple[int, ...]
    nbytes: int
    dense: np.ndarray | None = None
    scale: np.ndarray | None = None  # float32 [1], or one of each expert: times all values


@dataclass(eq=False)
class PagedKV:
    """Keys and values of one layer: [page, position in page, head, dimension]."""

    keys: np.ndarray
    values: np.ndarray


class ReferenceOps(ReferenceCollectives):
    """See kernels/ops.py for the meaning of every method."""

    name = "reference"
    captures = False

    def __init__(self, keep_bytes: int = KEEP_BYTES) -> None:
        self.keep_bytes = keep_bytes
        self.taken: Counter[str] = Counter()

    # --- memory ---------------------------------------------------------------------------
    def weight(self, data: np.ndarray, type_name: str, shape: tuple[int, ...]) -> ReferenceWeight:
        rows = data.reshape(-1) if len(shape) == 1 else data.reshape(shape[0], -1)
        return ReferenceWeight(rows, type_name, tuple(shape), data.nbytes)

    def scaled_weight(
        self, data: np.ndarray, type_name: str, shape: tuple[int, ...], scale: np.ndarray
    ) -> ReferenceWeight:
        """A tensor whose file has a factor of it in another one, as NVFP4's have."""
        weight = self.weight(data, type_name, shape)
        weight.scale = scale
        return weight

    def weight_rows(self, weight: Weight, start: int, stop: int) -> ReferenceWeight:
        rows = _own(weight).data[start:stop]
        return ReferenceWeight(rows, _own(weight).type_name, (len(rows), weight.shape[1]), 0)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        array = np.zeros(shape, dtype)
        self.taken["slots"] += array.nbytes
        return array

    def kv_cache(
        self,
        pages: int,
        kv_heads: int,
        page_tokens: int,
        key_dim: int,
        value_dim: int,
        key_type: str,
        value_type: str,
    ) -> PagedKV:
        shape = pages, page_tokens, kv_heads
        keys, values = (np.zeros((*shape, dim), np.float32) for dim in (key_dim, value_dim))
        self.taken["kv"] += keys.nbytes + values.nbytes
        return PagedKV(keys, values)

    def copy_page(self, cache: PagedKV, source: int, target: int) -> None:
        cache.keys[target] = cache.keys[source]
        cache.values[target] = cache.values[source]

    def scope(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reset_scratch(self) -> None:
        pass

    def upload(self, target: np.ndarray, values: np.ndarray) -> None:
        assert target.flags.c_contiguous
        target.reshape(-1)[: values.size] = values.reshape(-1)

    def to_host(self, x: np.ndarray) -> Array:
        return x.copy()

    def fetch(self, arrays: Sequence[np.ndarray]) -> Arrived:
        return Arrived([array.copy() for array in arrays])

    def capture(self) -> AbstractContextManager[Graph]:
        raise AssertionError("the reference does not capture")

    def prepare(self, run: Callable[[], None]) -> None:
        pass

    def synchronize(self) -> None:
        pass

    # --- the ends of a step ---------------------------------------------------------------
    def begin(self, batch: Batch, state: SlotState) -> None:
        goes_on = batch.continues != 0
        slots = batch.slots[goes_on]
        batch.tokens[goes_on] = state.last_token[slots]
        batch.positions[goes_on] = state.next_position[slots]
        batch.rope_positions[goes_on] = state.next_position[slots]
        fits = batch.positions < state.history.shape[1]  # a finished slot may go past the end
        state.history[batch.slots[fits], batch.positions[fits]] = batch.tokens[fits]

    def sample(self, logits: Array, batch: Batch, state: SlotState, out: StepOutput) -> None:
        sample(logits, batch, state, out)

    # --- models ---------------------------------------------------------------------------
    def embed(self, table: Weight, tokens: np.ndarray, scale: float = 1.0) -> Array:
        table = _own(table)
        rows = (
            dequantize(table.data[tokens], table.type_name)
            if table.dense is None
            else table.dense[tokens]
        )
        return rows * np.float32(scale)

    def rms_norm(
        self, x: np.ndarray, weight: Weight, eps: float, add_to: np.ndarray | None = None
    ) -> Array:
        runs = x.reshape(-1, weight.shape[0])
        mean = np.mean(runs * runs, axis=-1, keepdims=True)
        y = (runs / np.sqrt(mean + np.float32(eps)) * self.dense(weight)).reshape(x.shape)
        if add_to is None:
            return y
        add_to += y
        return add_to

    def softcap_(self, x: np.ndarray, cap: float) -> Array:
        x[...] = np.float32(cap) * np.tanh(x / np.float32(cap))
        return x

    def linear(
        self,
        x: np.ndarray,
        weight: Weight,
        bias: Weight | None = None,
        add_to: np.ndarray | None = None,
    ) -> Array:
        y = x @ self.dense(weight).T
        if bias is not None:
            y += self.dense(bias)
        if add_to is None:
            return y
        add_to += y
        return add_to

    def linears(
        self, x: np.ndarray, weights: Sequence[Weight], biases: Sequence[Weight | None]
    ) -> tuple[np.ndarray, ...]:
        return tuple(self.linear(x, w, b) for w, b in zip(weights, biases, strict=True))

    def glu(
        self,
        x: np.ndarray,
        gate: Weight,
        up: Weight,
        activation: str,
        gate_bias: Weight | None = None,
        up_bias: Weight | None = None,
    ) -> Array:
        return ACTIVATIONS[activation](self.linear(x, gate, gate_bias)) * self.linear(
            x, up, up_bias
        )

    def rope_angles(self, positions: np.ndarray, inv_freq: np.ndarray, scale: float) -> Array:
        angles = positions.astype(np.float32)[:, None] * inv_freq.astype(np.float32)
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1) * np.float32(scale)

    def rope_(self, x: np.ndarray, angles: np.ndarray, head_dim: int, layout: str) -> Array:
        assert layout in ("norm", "neox"), layout
        n = angles.shape[1]
        heads = x.reshape(len(x), -1, head_dim)
        assert np.shares_memory(heads, x)
        first, second = (
            (heads[..., 0 : 2 * n : 2], heads[..., 1 : 2 * n : 2])
            if layout == "norm"
            else (heads[..., :n], heads[..., n : 2 * n])
        )
        cos, sin = angles[:, None, :, 0], angles[:, None, :, 1]
        first[...], second[...] = first * cos - second * sin, first * sin + second * cos
        return x

    def store_kv(
        self, cache: PagedKV, k: np.ndarray, v: np.ndarray, batch: Batch, group: int
    ) -> None:
        page_tokens, heads = cache.keys.shape[1:3]
        page = batch.pages[group][batch.slots, batch.positions // page_tokens]
        place = batch.positions % page_tokens
        cache.keys[page, place] = k.reshape(len(k), heads, -1)
        cache.values[page, place] = v.reshape(len(v), heads, -1)

    def rope_store(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        angles: np.ndarray,
        layout: str,
        cache: PagedKV,
        batch: Batch,
        group: int,
        eps: float = 0.0,
        q_norm: Weight | None = None,
        k_norm: Weight | None = None,
    ) -> Array:
        norms, store, dim = (q_norm, k_norm), (cache, batch, group), cache.keys.shape[3]
        return rope_store_in_parts(self, (q, k, v), angles, layout, store, eps, norms, dim)

    def attention(
        self,
        q: np.ndarray,
        cache: PagedKV,
        batch: Batch,
        group: int,
        head_map: Sequence[int],
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Array:
        return self.attend(q, cache, batch, group, head_map, scale, window, softcap)[0]

    def attend(
        self,
        q: np.ndarray,
        cache: PagedKV,
        batch: Batch,
        group: int,
        head_map: Sequence[int],
        scale: float,
        window: int,
        softcap: float,
    ) -> tuple[Array, Array]:
        """attention, and log(sum(exp(score))) of each head; zeros and -inf for who sees nothing."""
        heads, key_dim, value_dim = len(head_map), cache.keys.shape[3], cache.values.shape[3]
        queries = q.reshape(len(q), heads, key_dim)
        out = np.zeros((len(q), heads, value_dim), np.float32)
        weights = np.full((len(q), heads), -np.inf, np.float32)
        for start, stop in rows_of(batch.slots):
            positions = batch.positions[start:stop]
            table = batch.pages[group][batch.slots[start]]
            first = max(0, int(positions.min()) - window + 1) if window else 0
            keys, values = _read(cache, table, first, max(1, int(positions.max()) + 1))
            seen = np.arange(first, first + len(keys))
            visible = seen <= positions[:, None]
            if window:
                visible &= positions[:, None] - seen < window
            some = visible.any(axis=1)
            visible = visible[some]
            for h, kv in enumerate(head_map):
                scores = queries[start:stop, h][some] @ keys[:, kv].T * np.float32(scale)
                if softcap:
                    scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
                scores = np.where(visible, scores, np.float32(-np.inf))
                out[start:stop, h][some] = softmax(scores) @ values[:, kv]
                top = scores.max(axis=1)
                weights[start:stop, h][some] = top + np.log(np.exp(scores - top[:, None]).sum(1))
        return out.reshape(len(q), heads * value_dim), weights

    def gather(self, x: np.ndarray, index: np.ndarray) -> Array:
        return x[index]

    def copy(self, x: np.ndarray) -> Array:
        return x.copy()

    # --- not in the contract --------------------------------------------------------------
    def dense(self, weight: Weight) -> Array:
        """The float32 form of `weight`."""
        weight = _own(weight)
        if weight.dense is not None:
            return weight.dense
        dense = dequantize(weight.data, weight.type_name).reshape(weight.shape)
        if weight.scale is not None:
            dense = dense * weight.scale.reshape(-1, *[1] * (dense.ndim - 1))
        if dense.nbytes <= self.keep_bytes:
            self.keep_bytes -= dense.nbytes
            weight.dense = dense
        return dense


def dequantize(data: np.ndarray, type_name: str) -> Array:
    """float32 values of rows of bytes."""
    kind = gguf.GGMLQuantizationType[type_name]
    return np.asarray(gguf.quants.dequantize(data, kind), np.float32)


def softmax(scores: np.ndarray) -> Array:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def silu(x: np.ndarray) -> Array:
    with np.errstate(over="ignore"):  # exp(-x) of a very negative x is inf, and x / inf is 0
        return x / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> Array:
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


def _own(weight: Weight) -> ReferenceWeight:
    assert isinstance(weight, ReferenceWeight)
    return weight


def _read(
    cache: PagedKV, table: np.ndarray, first: int, last: int
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [last - first, heads, dimension] of a slot's positions first to last - 1.

    Nothing else is read: it may be another slot's by now."""
    page_tokens = cache.keys.shape[1]
    at = np.arange(first, last)
    page, place = table[at // page_tokens], at % page_tokens
    return cache.keys[page, place], cache.values[page, place]
