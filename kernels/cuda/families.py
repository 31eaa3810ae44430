"""FamilyOps in CUDA: the launchers of experts, delta nets, streams and sparse attention as methods.

CudaFamilies knows what it is mixed into as a Launcher that has a few Ops: family_ops.py makes the
backend of it, and tests run it on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from voltapile.kernels.cuda import delta, experts, gemm, mixes, sparse, split, streams
from voltapile.kernels.cuda.expert_table import ExpertTable, Shared, places_of
from voltapile.kernels.cuda.file_table import FileTable, RowReader
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray
from voltapile.kernels.cuda.matmul import Policy
from voltapile.kernels.cuda.states import Porter, State, state_bytes
from voltapile.kernels.families import (
    DeltaShape,
    DeltaWeights,
    MixWeights,
    NGramHash,
    NGramWeights,
    SharedExpert,
    ngram_numbers,
    stream_in,
)
from voltapile.kernels.ops import Batch, Weight

FEW = 64  # rows of streams that may be added to late


class Host(RowReader, Protocol):
    """What the methods below need. tickets: uint32 [experts.TICKETS], zeros. porter: of states.
    prompt_policy: of products with rows that rows_alone leaves."""

    tickets: DeviceArray
    porter: Porter
    _added: tuple[DeviceArray, DeviceArray, DeviceArray] | None

    @property
    def prompt_policy(self) -> Policy: ...

    def linear(self, x: DeviceArray, weight: Weight) -> DeviceArray: ...

    def linears(
        self, x: DeviceArray, weights: Sequence[Weight], biases: Sequence[Weight | None]
    ) -> tuple[DeviceArray, ...]: ...

    def rows_alone(self, x: DeviceArray) -> int | None:
        """So many first rows must have the bits that they have alone; None: all."""

    def table(self, values: np.ndarray) -> DeviceArray:
        """Some host values on the device, for ever."""

    def pinned(self, nbytes: int) -> np.ndarray:
        """Page-locked host memory at the same address for kernels, as long as these Ops live."""


class CudaFamilies:
    """See kernels/families.py for the meaning of every method. Before anything is launched comes
    `add_to_streams`."""

    # What a stream_add_ was told: stream_in may do it. Its arrays may be free already, so nothing
    # is launched before it.
    _added: tuple[DeviceArray, DeviceArray, DeviceArray] | None = None

    # --- experts ------------------------------------------------------------------------------
    def expert_table(self: Host, gate: Weight, up: Weight, down: Weight, first: int) -> ExpertTable:
        own = _own(gate), _own(up), _own(down)
        return ExpertTable(*own, first, self.table(places_of(*own)))

    def route(
        self: Host,
        x: DeviceArray,
        router: Weight,
        used: int,
        counts: DeviceArray,
        batch: Batch,
        is_rounded: bool = False,
    ) -> tuple[DeviceArray, DeviceArray]:
        own, generated = _own(router), batch.generated
        if experts.fits(own):
            tail = self.tickets, is_rounded, self.rows_alone(x)
            return experts.route(self, x, own, used, counts, generated, *tail)
        logits = self.linear(experts.to_bf16(self, x) if is_rounded else x, router)
        return experts.choose(self, logits, used, counts, generated)

    def experts(
        self: Host,
        x: DeviceArray,
        routing: tuple[DeviceArray, DeviceArray],
        table: ExpertTable,
        add_to: DeviceArray | None = None,
        shared: SharedExpert | None = None,
    ) -> DeviceArray:
        alone, policy = self.rows_alone(x), self.prompt_policy
        other = shared_of(shared)
        return experts.experts(self, x, routing, table, add_to, alone, other, policy)

    def gate_rows_(self: Host, y: DeviceArray, x: DeviceArray, weight: Weight) -> DeviceArray:
        return experts.gate_rows_(self, y, x, _own(weight))

    def gate_(self: Host, y: DeviceArray, gate: DeviceArray) -> DeviceArray:
        late = split.late_part(gate)
        if late is None or y.shape != gate.shape:
            return experts.gate_(self, y, gate)
        return split.gate_(self, y, late.lies(), late.dim)

    def split_heads(self: Host, x: DeviceArray, dim: int) -> tuple[DeviceArray, DeviceArray]:
        return split.split_heads(self, x, dim)

    # --- delta nets ---------------------------------------------------------------------------
    def delta_state(self: Host, slots: int, shape: DeltaShape) -> State:
        return delta.delta_state(self, slots, shape)

    def delta_net(
        self: Host,
        inputs: tuple[DeviceArray, DeviceArray, DeviceArray],
        weights: DeltaWeights,
        shape: DeltaShape,
        state: State,
        batch: Batch,
    ) -> DeviceArray:
        own = (_own(each) for each in (weights.conv1d, weights.a, weights.dt, weights.norm))
        parts = delta.Parts(*own)
        return delta.delta_net(self, inputs, parts, shape, state, batch, self.tickets)

    # --- residual streams ---------------------------------------------------------------------
    def streams(self: Host, x: DeviceArray, count: int) -> DeviceArray:
        return streams.streams(self, x, count)

    def stream_in(
        self: Host,
        x: DeviceArray,
        before: tuple[DeviceArray, DeviceArray] | None,
        mix: MixWeights,
        width: int,
        eps: float,
    ) -> tuple[DeviceArray, DeviceArray | None]:
        """Rows that must have the bits that they have alone take kernels of their own. What is late
        may lie in memory that is free already: only those kernels see to that."""
        if not mixes.fits(self, mix, width):
            return stream_in(self, x, before, mix, width, eps)  # type: ignore[arg-type]
        alone = self.rows_alone(x)
        if alone is None or alone >= len(x):
            if before is None and self._added is not None and is_same(self._added[0], x):
                (_, *late), self._added = self._added, None
                before = late[0], late[1]
            injects = None if mix.inject is None else self.scratch((len(x), mix.inject.shape[0]))
            outs = self.scratch((len(x), width)), injects
            mixes.stream_in(self, x, before, mix, outs, eps)
            return outs
        h, inject = _stream_prompt(self, x, before, mix, width, eps)
        first = h[:alone], None if inject is None else inject[:alone]
        mixes.stream_in(self, x[:alone], None, mix, first, eps)
        return h, inject

    def stream_norm(
        self: Host, x: DeviceArray, weight: Weight, width: int, eps: float
    ) -> DeviceArray:
        return streams.stream_norm(self, x, _own(weight), width, eps)

    def stream_mix(self: Host, x: DeviceArray, gate: DeviceArray, width: int) -> DeviceArray:
        return streams.stream_mix(self, x, gate, width)

    def stream_add_(self: Host, x: DeviceArray, inject: DeviceArray, y: DeviceArray) -> DeviceArray:
        if not 0 < len(x) <= FEW:
            return streams.stream_add_(self, x, inject, y)
        self.kernel(streams.ADD)  # to be there in any case
        self._added = x, inject, y
        return x

    def add_to_streams(self: Host) -> None:
        """What is late."""
        if self._added is not None:
            added, self._added = self._added, None
            streams.stream_add_(self, *added)

    def silu_(self: Host, x: DeviceArray, scale: float = 1.0) -> DeviceArray:
        return streams.silu_(self, x, scale)

    # --- n-grams ------------------------------------------------------------------------------
    def ngram_rows(self: Host, batch: Batch, hashing: NGramHash) -> DeviceArray:
        return streams.ngram_rows(self, batch, hashing)

    def ngram_expect(self: Host, table: Weight, tokens: np.ndarray, hashing: NGramHash) -> None:
        if isinstance(table, FileTable):
            table.stage.expect(ngram_numbers(tokens, hashing))

    def ngram_gather(self: Host, table: Weight, rows: DeviceArray) -> DeviceArray:
        return streams.ngram_gather(self, _own(table), rows)

    def ngram_state(self: Host, slots: int, width: int, rows: int) -> State:
        return streams.ngram_state(self, slots, width, rows)

    def ngram_add_(
        self: Host,
        x: DeviceArray,
        key: DeviceArray,
        value: DeviceArray,
        weights: NGramWeights,
        state: State,
        batch: Batch,
        eps: float,
    ) -> DeviceArray:
        own = streams.Parts(
            norm_key=_own(weights.norm_key),
            norm_query=_own(weights.norm_query),
            norm_conv=_own(weights.norm_conv),
            conv1d=_own(weights.conv1d),
            dilation=weights.dilation,
        )
        return streams.ngram_add_(self, x, key, value, own, state, batch, eps)

    # --- attention to chosen blocks -----------------------------------------------------------
    def index_cache(
        self: Host, pages: int, page_tokens: int, dim: int, block: int
    ) -> sparse.IndexCache:
        return sparse.index_cache(self, pages, page_tokens, dim, block)

    def index_store(
        self: Host,
        cache: sparse.IndexCache,
        keys: DeviceArray,
        norm: Weight,
        rope: tuple[np.ndarray, float],
        batch: Batch,
        group: int,
        eps: float,
    ) -> None:
        sparse.index_store(self, cache, keys, _own(norm), rope, batch, group, eps)

    def index_heads(
        self: Host,
        cache: sparse.IndexCache,
        made: tuple[DeviceArray, DeviceArray],
        norms: tuple[Weight, Weight],
        angles: DeviceArray,
        rope: tuple[np.ndarray, float],
        batch: Batch,
        group: int,
        eps: float,
    ) -> DeviceArray:
        (q, keys), (q_norm, k_norm) = made, map(_own, norms)
        queries = sparse.Queries(q, q_norm, angles)
        return sparse.index_store(self, cache, keys, k_norm, rope, batch, group, eps, queries)

    def choose_blocks(
        self: Host,
        q: DeviceArray,
        cache: sparse.IndexCache,
        batch: Batch,
        group: int,
        heads: int,
        top_k: int,
    ) -> sparse.Chosen:
        return sparse.choose_blocks(self, q, cache, batch, group, heads, top_k)

    def attention_to(
        self: Host,
        chosen: sparse.Chosen,
        q: DeviceArray,
        cache: Any,
        batch: Batch,
        group: int,
        head_map: Sequence[int],
        scale: float,
        gate: DeviceArray | None = None,
    ) -> DeviceArray:
        return sparse.attention_to(self, chosen, q, cache, batch, group, head_map, scale, gate)

    # --- states -------------------------------------------------------------------------------
    def state_bytes(self: Host, state: State) -> int:
        return state_bytes(state)

    def checkpoint_memory(self: Host, states: Sequence[State], count: int) -> np.ndarray:
        self.porter.pack(states)
        found = self.pinned(count * sum(map(state_bytes, states))).reshape(count, -1)
        found[0] = 0  # which is looked at, with what lies between arrays
        return found

    def save_states(self: Host, states: Sequence[State], slot: int, target: np.ndarray) -> None:
        self.porter.save(states, slot, target)

    def restore_states(self: Host, states: Sequence[State], slot: int, source: np.ndarray) -> None:
        self.porter.restore(states, slot, source)


def _stream_prompt(
    ops: Host,
    x: DeviceArray,
    before: tuple[DeviceArray, DeviceArray] | None,
    mix: MixWeights,
    width: int,
    eps: float,
) -> tuple[DeviceArray, DeviceArray | None]:
    """families.stream_in for many rows, but that the gate is taken as the product leaves it."""
    h = streams.stream_norm(ops, x, _own(mix.norm), width, eps, before)
    weights = [mix.down] if mix.inject is None else [mix.down, mix.inject]
    low, *inject = ops.linears(h, weights, [None] * len(weights))
    low, up = streams.silu_(ops, low, width / x.shape[1]), _own(mix.up)
    is_fused = ops.prompt_policy.way(len(x)) == "fused"
    gate, scales = None, None
    if gemm.fits([up], up.shape[1], is_fused):
        halves = gemm.halves_of(ops, low, [up])[gemm.is_natural(up)]
        gate, scales = gemm.sums(ops, halves, up, is_fused), halves.scales
    gate = ops.linear(low, up) if gate is None else gate
    return streams.stream_mix(ops, h, gate, width, scales), inject[0] if inject else None


def is_same(one: DeviceArray, other: DeviceArray) -> bool:
    return (one.ptr, one.shape) == (other.ptr, other.shape)


def shared_of(expert: SharedExpert | None) -> Shared | None:
    if expert is None:
        return None
    router = None if expert.router is None else _own(expert.router)
    return Shared(_own(expert.gate), _own(expert.up), _own(expert.down), router)


def _own(weight: Weight) -> CudaWeight:
    assert isinstance(weight, CudaWeight)
    return weight
