"""FamilyOps: what the Qwen families need beyond Ops: experts, delta nets, streams, n-grams, blocks.

Shapes as in ops.py; E experts, F their inner width, S residual streams of width D. A state is what
a layer remembers of each slot instead of a cache: an opaque object with a row for every slot. A
token at position 0 finds it empty, so that nothing has to be cleared for a new request.

A step may be provisional (drafts that may be rejected): it reads states and writes none of them,
but logs what its tokens would have done. The next step of that slot first does the first
batch.kept[slot] of those, in the same arithmetic, so that bits do not depend on drafting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from voltapile.kernels.ops import Array, Batch, Ops, Weight

MAX_PROVISIONAL = 8  # tokens of a slot in a provisional step
INDEX_RING = 16  # positions of a page whose index keys are kept: a block, and provisional ones


@dataclass(frozen=True)
class DeltaShape:
    """A gated delta net, as much of it as is computed here. Heads have `dim` keys and values."""

    key_heads: int
    value_heads: int
    dim: int
    kernel: int  # taps of the convolution
    key_head_of: tuple[int, ...]  # local value head -> local key head
    gate: str  # "silu" or "sigmoid", of the output
    eps: float

    @property
    def channels(self) -> int:
        """Of the convolution: q and k of all key heads, then v."""
        return (2 * self.key_heads + self.value_heads) * self.dim


@dataclass(frozen=True)
class DeltaWeights:
    """conv1d [channels, kernel]; a (negative) and dt [value heads]; norm [dim]."""

    conv1d: Weight
    a: Weight
    dt: Weight
    norm: Weight


@dataclass(frozen=True)
class NGramHash:
    """Which rows of the table a token's n-grams have. Orders 2 to N, several heads each."""

    multipliers: tuple[int, ...]  # of the token itself and the N - 1 before it
    moduli: tuple[int, ...]  # of each head
    offsets: tuple[int, ...]
    boundary: int  # the token id that stands for everything before a beginning


@dataclass(frozen=True)
class NGramWeights:
    """norm_* [S * D], conv1d [S * D, kernel]; the convolution's taps are `dilation` apart."""

    norm_key: Weight
    norm_query: Weight
    norm_conv: Weight
    conv1d: Weight
    dilation: int


@dataclass(frozen=True)
class MixWeights:
    """From S streams of width D to one: norm [S * D], down [R, S * D], up [S * D, R], and inject
    [S, S * D], which the last mix of a model has not."""

    norm: Weight
    down: Weight
    up: Weight
    inject: Weight | None


@dataclass(frozen=True)
class SharedExpert:
    """The one that every token takes: gate, up [F, D] and down [D, F]; router [D], if there is
    one, makes the factor of its inner values."""

    gate: Weight
    up: Weight
    down: Weight
    router: Weight | None


class FamilyOps(Ops, Protocol):
    # --- experts --------------------------------------------------------------------------
    def expert_table(self, gate: Weight, up: Weight, down: Weight, first: int) -> Any:
        """gate, up [E, F, D] and down [E, D, F]: a layer's experts `first`, first + 1 ... , which
        are computed here. Tells for each its place; opaque."""

    def route(
        self,
        x: Array,
        router: Weight,
        used: int,
        counts: Array,
        batch: Batch,
        is_rounded: bool = False,
    ) -> tuple[Array, Array]:
        """Experts int32 [T, used] of each token and their weights float32 [T, used]: softmax over
        all logits, the largest (of equal ones the first), divided by their sum.

        counts int64 [2, all experts]: += 1 for each choice, in row 0 by tokens of prompts and in
        row 1 by generated ones. is_rounded: x is rounded to BF16 first."""

    def experts(
        self,
        x: Array,
        routing: tuple[Array, Array],
        table: Any,
        add_to: Array | None = None,
        shared: SharedExpert | None = None,
    ) -> Array:
        """[T, D]: sum of weight * down(silu(gate x) * up x) over a token's experts that lie in
        table, in the order of routing, and of `shared`. add_to: accumulate there and return it."""

    def gate_rows_(self, y: Array, x: Array, weight: Weight) -> Array:
        """y [T, N] *= sigmoid(x [T, D] . weight [D]), one factor for each row."""

    def gate_(self, y: Array, gate: Array) -> Array:
        """y *= sigmoid(gate), of the same shape."""

    def split_heads(self, x: Array, dim: int) -> tuple[Array, Array]:
        """x [T, H * 2 * dim] -> the first and the second dim values of each head, [T, H * dim]."""

    # --- delta nets -----------------------------------------------------------------------
    def delta_state(self, slots: int, shape: DeltaShape) -> Any:
        """State of one layer: the last kernel - 1 inputs of the convolution, and for each value
        head a float32 matrix [dim, dim]."""

    def delta_net(
        self,
        inputs: tuple[Array, Array, Array],
        weights: DeltaWeights,
        shape: DeltaShape,
        state: Any,
        batch: Batch,
    ) -> Array:
        """[T, value heads * dim]. inputs: m [T, channels] before the convolution, z [T, value
        heads * dim], and of each value head b and a, [T, 2 * value heads]: b of all, then a.

        c = silu(causal convolution of m); q, k of it, each divided by sqrt(sum of squares + eps)
        and q by sqrt(dim). For each value head, in the order of tokens: S *= exp(A softplus(a +
        dt)); S += k (sigmoid(b) (v - S' k))'; o = S' q; rms_norm(o) * norm * gate(z)."""

    # --- residual streams -----------------------------------------------------------------
    def streams(self, x: Array, count: int) -> Array:
        """[T, S * D]: x [T, D] S times side by side."""

    def stream_in(
        self,
        x: Array,
        before: tuple[Array, Array] | None,
        mix: MixWeights,
        width: int,
        eps: float,
    ) -> tuple[Array, Array | None]:
        """What a half of a layer takes of the streams x [T, S * D], [T, D], and how its answer will
        go to each of them, [T, S]; see `stream_in` below. before: inject and y of the half before,
        which are added to x first."""

    def stream_norm(self, x: Array, weight: Weight, width: int, eps: float) -> Array:
        """Each run of `width` values divided by its root mean square; times weight [S * D]."""

    def stream_mix(self, x: Array, gate: Array, width: int) -> Array:
        """[T, D]: mean over streams of x * sigmoid(gate), both [T, S * D]."""

    def stream_add_(self, x: Array, inject: Array, y: Array) -> Array:
        """x [T, S * D]: stream s += 2 sigmoid(inject[t, s] / S) * y [T, D]."""

    def silu_(self, x: Array, scale: float = 1.0) -> Array:
        """x = silu(x * scale)."""

    # --- n-grams --------------------------------------------------------------------------
    def ngram_rows(self, batch: Batch, hashing: NGramHash) -> Array:
        """int64 [T, heads]: rows of the table, by each token and those before it in
        batch.history."""

    def ngram_expect(self, table: Weight, tokens: np.ndarray, hashing: NGramHash) -> None:
        """A run of a text, int32 [n], is about to be computed: a table on a drive may be read
        ahead. Nothing but time depends on it."""

    def ngram_gather(self, table: Weight, rows: Array) -> Array:
        """float32 [T, heads * row width]."""

    def ngram_state(self, slots: int, width: int, rows: int) -> Any:
        """State: the last `rows` inputs [width] of the convolution."""

    def ngram_add_(
        self,
        x: Array,
        key: Array,
        value: Array,
        weights: NGramWeights,
        state: Any,
        batch: Batch,
        eps: float,
    ) -> Array:
        """x, key [T, S * D], value [T, D]. Of each stream: s = norm(key) . norm(x) / sqrt(D);
        v = sigmoid(sign(s) sqrt(max(|s|, 1e-6))) * value; x += v + silu(causal convolution of
        norm(v))."""

    # --- attention to chosen blocks -------------------------------------------------------
    def index_cache(self, pages: int, page_tokens: int, dim: int, block: int) -> Any:
        """Float32 keys [dim] of the last INDEX_RING positions of each page, and one for each whole
        block of positions."""

    def index_store(
        self,
        cache: Any,
        keys: Array,
        norm: Weight,
        rope: tuple[np.ndarray, float],
        batch: Batch,
        group: int,
        eps: float,
    ) -> None:
        """keys [T, dim], neither normed nor rotated. Of each block that is whole now: the mean of
        its keys, rms_norm, "neox" rotation by inv_freq and scale at its first position."""

    def index_heads(
        self,
        cache: Any,
        made: tuple[Array, Array],
        norms: tuple[Weight, Weight],
        angles: Array,
        rope: tuple[np.ndarray, float],
        batch: Batch,
        group: int,
        eps: float,
    ) -> Array:
        """What a layer's indexer makes of its queries [T, heads * dim] and keys [T, dim]: queries
        by head normed and rotated by angles, keys stored; see IndexHeads below. The queries may
        be changed in place."""

    def choose_blocks(
        self, q: Array, cache: Any, batch: Batch, group: int, heads: int, top_k: int
    ) -> Any:
        """Of each token the top_k / block whole blocks with the largest sum over heads of
        relu(q . block's key), of equal ones the first; opaque. Positions behind the last whole
        block are always seen. q [T, heads * dim], normed and rotated."""

    def attention_to(
        self,
        chosen: Any,
        q: Array,
        cache: Any,
        batch: Batch,
        group: int,
        head_map: Sequence[int],
        scale: float,
        gate: Array | None = None,
    ) -> Array:
        """As `attention`, over the positions of the chosen blocks and those behind them. gate: of
        the result's shape; times its sigmoid."""

    # --- states ---------------------------------------------------------------------------
    def state_bytes(self, state: Any) -> int:
        """What one slot of it takes."""

    def checkpoint_memory(self, states: Sequence[Any], count: int) -> np.ndarray:
        """uint8 [count, bytes]: host memory for the states of so many slots, one in each row, to be
        saved to and restored from. Made once, when a model is loaded."""

    def save_states(self, states: Sequence[Any], slot: int, target: np.ndarray) -> None:
        """Copy a slot's states into a row of checkpoint_memory. What is submitted later finds them
        there, and the host after `synchronize`."""

    def restore_states(self, states: Sequence[Any], slot: int, source: np.ndarray) -> None: ...


class GatedOps(Ops, Protocol):
    """What add_shared needs."""

    def gate_rows_(self, y: Array, x: Array, weight: Weight) -> Array: ...


def add_shared(ops: GatedOps, x: Array, shared: SharedExpert, add_to: Array | None) -> Array:
    """The shared expert alone, by other Ops."""
    inner = ops.glu(x, shared.gate, shared.up, "silu")
    if shared.router is not None:
        ops.gate_rows_(inner, x, shared.router)
    return ops.linear(inner, shared.down, add_to=add_to)


def stream_in(
    ops: FamilyOps,
    x: Array,
    before: tuple[Array, Array] | None,
    mix: MixWeights,
    width: int,
    eps: float,
) -> tuple[Array, Array | None]:
    """FamilyOps.stream_in, of the other operations on streams."""
    if before is not None:
        ops.stream_add_(x, *before)
    h = ops.stream_norm(x, mix.norm, width, eps)
    weights = [mix.down] if mix.inject is None else [mix.down, mix.inject]
    low, *inject = ops.linears(h, weights, [None] * len(weights))
    low = ops.silu_(low, width / x.shape[1])
    return ops.stream_mix(h, ops.linear(low, mix.up), width), inject[0] if inject else None


class IndexHeads:
    """FamilyOps.index_heads of a backend that has nothing better than other operations."""

    def index_heads(
        self: FamilyOps,
        cache: Any,
        made: tuple[Array, Array],
        norms: tuple[Weight, Weight],
        angles: Array,
        rope: tuple[np.ndarray, float],
        batch: Batch,
        group: int,
        eps: float,
    ) -> Array:
        q, keys = made
        q = self.rms_norm(q, norms[0], eps)
        self.rope_(q, angles, keys.shape[1], "neox")
        self.index_store(cache, keys, norms[1], rope, batch, group, eps)
        return q


def ngram_numbers(tokens: np.ndarray, hashing: NGramHash) -> np.ndarray:
    """int64 [n, heads]: FamilyOps.ngram_rows on the host, of the tokens of a run but the first
    ones, whose predecessors are not in it."""
    order, seen = len(hashing.multipliers), np.asarray(tokens, np.int64).view(np.uint64)
    count, heads = max(0, len(seen) - order + 1), len(hashing.moduli) // (order - 1)
    factors, moduli, offsets = (
        np.array([number % 2**64 for number in numbers], np.uint64)
        for numbers in (hashing.multipliers, hashing.moduli, hashing.offsets)
    )
    boundary, is_over = np.uint64(hashing.boundary % 2**64), np.zeros(count, bool)
    hashed, found = seen[order - 1 :] * factors[0], []
    for back in range(1, order):
        before = seen[order - 1 - back :][:count]
        is_over |= before == boundary
        hashed = hashed ^ np.where(is_over, boundary, before) * factors[back]
        mine = slice((back - 1) * heads, back * heads)
        found.append(hashed[:, None] % moduli[mine] + offsets[mine])
    return np.concatenate(found, axis=1).view(np.int64)
