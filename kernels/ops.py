"""Ops: the contract of computations that models are written against, and the arrays of a step.

Three implementations: reference (numpy), cpu (C++), cuda. A model knows only this file. Arrays
are the backend's own (numpy.ndarray for reference and cpu); activations are float32. Shapes in
comments: T tokens of the step, R sampled rows, S slots, D width, H heads, d head size, V vocab.

An array that an Op returns lives in scratch memory: until the enclosing `scope()` ends, or the
step does. Everything that varies between replays of a captured step is read from the arrays of
Batch and SlotState when the Op runs, never when it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from voltapile.kernels.group import Collectives

Array = Any  # the backend's array type

# codes in StepOutput.finish
RUNNING, STOP, LENGTH, DONE_BEFORE, NOT_FINITE = range(5)
FINISH_NAMES = ("", "stop", "length", "", "error")

MAX_STOP_IDS = 16
MAX_LOGIT_BIAS = 1024  # biased tokens of a slot
MAX_LOGPROBS = 20  # alternatives of a sampled token
MAX_FETCHES = 4


@dataclass
class Batch:
    """The ragged batch of one step, in device memory. Tokens of a row are neighbours.

    continues[t] is 1 where token t and its positions come from SlotState (`begin` fills them).
    """

    tokens: Array  # int32[T]
    slots: Array  # int32[T] the slot whose page table token t uses
    positions: Array  # int32[T] cache index of the token
    rope_positions: Array  # int32[T]
    continues: Array  # int32[T]
    outputs: Array  # int32[R] index into T of the tokens after which one is sampled
    pages: tuple[Array, ...]  # int32[S, P] page table of each cache group
    generated: int = 0  # so many first tokens are generated rows: bits must not depend on company
    history: Array | None = None  # SlotState's, for models that look at tokens before theirs
    kept: Array | None = None  # int32[S] tokens of a slot's provisional step that stand; None: all
    is_provisional: bool = False  # see kernels/families.py
    here: Any = None  # Kept (kernels/positions.py), where ranks share out positions
    long_rows: int = -1  # rows of more than 8 tokens; -1: nobody has counted


@dataclass
class SlotState:
    """What the worker remembers of each slot between steps, in device memory."""

    last_token: Array  # int32[S] sampled last, not yet computed
    next_position: Array  # int32[S] the cache position that last_token will take
    finished: Array  # int32[S] a finish code; 0 while the slot generates
    max_position: Array  # int32[S] sampling a token for this position or later finishes "length"
    stop_ids: Array  # int32[S, MAX_STOP_IDS], padded with -1
    temperature: Array  # float32[S]; 0 is greedy
    top_k: Array  # int32[S]; 0 is off
    top_p: Array  # float32[S]; 1 is off
    min_p: Array  # float32[S]; 0 is off
    seed: Array  # uint64[S]
    history: Array  # int32[S, context] the token at each cache position (`begin` writes it)
    prompt_tokens: Array  # int32[S] positions before it are the prompt's, later ones generated
    penalty_window: Array  # int32[S] so many tokens before the new one count; 0: all
    repetition_penalty: Array  # float32[S]; 1 is off
    presence_penalty: Array  # float32[S]; 0 is off
    frequency_penalty: Array  # float32[S]; 0 is off
    bias_count: Array  # int32[S] how many of bias_ids and bias_values hold
    bias_ids: Array  # int32[S, MAX_LOGIT_BIAS], each id once
    bias_values: Array  # float32[S, MAX_LOGIT_BIAS]
    logprobs: Array  # int32[S] alternatives to report with a token; -1: no probabilities at all
    masked: Array  # int32[S] 1: only the tokens in mask may be chosen
    mask: Array  # uint32[S, W] of token t bit t % 32 of word t // 32
    forced: Array  # int32[S] this token is taken, whatever the logits are; -1: none


@dataclass
class StepOutput:
    """What `sample` writes; the one small copy that comes back from a step.

    Log-probabilities are of the unmodified distribution (temperature 1, no penalty, no bias).
    Column 0 is the sampled token, then come the best ones, largest first, equal ones by id. Unused
    places, and rows whose slot does not want any, hold id -1 and 0.
    """

    codes: Array  # int32[2, R]: the next two together, for one copy
    tokens: Array  # int32[R]; -1 where finish is DONE_BEFORE or NOT_FINITE
    finish: Array  # int32[R] codes above
    logprob_ids: Array  # int32[R, 1 + MAX_LOGPROBS]
    logprobs: Array  # float32[R, 1 + MAX_LOGPROBS]


class Weight(Protocol):
    """A matrix (or a vector) of the model in the backend's own form. shape is numpy's (N, K)."""

    shape: tuple[int, ...]
    nbytes: int


class Graph(Protocol):
    """A recorded step."""

    def replay(self) -> None: ...


class Arrival(Protocol):
    """Values on their way to the host."""

    def is_there(self) -> bool:
        """Whether `take` would not wait."""

    def take(self) -> list[np.ndarray]: ...


class Arrived:
    """Values of a backend that computes at once."""

    def __init__(self, values: list[np.ndarray]) -> None:
        self._values = values

    def is_there(self) -> bool:
        return True

    def take(self) -> list[np.ndarray]:
        return self._values


class Ops(Collectives, Protocol):
    """Computations on one device. Methods whose name ends in _ change their first argument."""

    name: str
    captures: bool

    @property
    def taken(self) -> Mapping[str, int]:
        """Bytes that were allocated, by purpose: weights, kv, slots, scratch, communication."""

    # --- memory ---------------------------------------------------------------------------
    def weight(self, data: np.ndarray, type_name: str, shape: tuple[int, ...]) -> Weight:
        """Take a tensor: `data` is its raw uint8 bytes (a view of the mapped file, may be kept),
        `type_name` its GGUF type, `shape` numpy's order (rows, columns)."""

    def weight_rows(self, weight: Weight, start: int, stop: int) -> Weight:
        """Some rows of a matrix, in the same memory. start is a multiple of 64."""

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A persistent array."""

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
        """The paged keys and values of one layer (opaque; both for store_kv and attention)."""

    def copy_page(self, cache: Any, source: int, target: int) -> None:
        """Copy one page of a kv_cache over another."""

    def scope(self) -> AbstractContextManager[None]:
        """Scratch arrays made inside are free again at its end."""

    def reset_scratch(self) -> None:
        """Forget all scratch arrays; called before each step (and each recording)."""

    def upload(self, target: Array, values: np.ndarray) -> None:
        """Copy host values over the first elements of a persistent array (device memory)."""

    def to_host(self, x: Array) -> np.ndarray:
        """A numpy copy (waits for the device)."""

    def fetch(self, arrays: Sequence[Array]) -> Arrival:
        """Copies of small arrays as they are after everything submitted so far, which need not
        have run. No more than MAX_FETCHES may be under way."""

    def capture(self) -> AbstractContextManager[Graph]:
        """Ops called inside are recorded, not run; scratch addresses stay valid for replays."""

    def prepare(self, run: Callable[[], None]) -> None:
        """Make ready what `run` needs, e.g. compile it; after all weights. `run` calls Ops whose
        results it does not look at; they may or may not be computed."""

    def synchronize(self) -> None:
        """Wait until everything submitted has run."""

    # --- the ends of a step ---------------------------------------------------------------
    def begin(self, batch: Batch, state: SlotState) -> None:
        """For each token with continues[t]: tokens, positions and rope_positions from its slot.

        Then history[slot, position] = token for every token of the batch."""

    def sample(self, logits: Array, batch: Batch, state: SlotState, out: StepOutput) -> None:
        """Choose a token for each row of logits [R, V] by its slot's parameters.

        For row i: t = outputs[i], s = slots[t], p = positions[t] + 1 (the new token's position).
        If finished[s] is set: tokens[i] = -1, finish[i] = DONE_BEFORE, and nothing else changes.
        A row with a NaN or +inf, or with nothing but -inf (which means "never"), before or after
        bias, penalties and mask: -1, NOT_FINITE, finished[s] = NOT_FINITE.
        Otherwise writes out, last_token[s], next_position[s] = p, and the finish code: STOP if
        the token is a stop id, else LENGTH if p + 1 >= max_position[s]; also into finished[s].
        The random number is a function of (seed[s], p, purpose) alone; see kernels/random.md, which
        also says what bias and penalties do. Penalties look at history[s] before position p.
        """

    # --- models ---------------------------------------------------------------------------
    def embed(self, table: Weight, tokens: Array, scale: float = 1.0) -> Array:
        """float32 [T, D]: rows of table, times scale."""

    def rms_norm(self, x: Array, weight: Weight, eps: float, add_to: Array | None = None) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight, where weight is a vector: over the last axis, or over
        each run of weight's length in it (the heads of a q). add_to, of x's shape: accumulate
        there (+=) and return it instead of a new array."""

    def softcap_(self, x: Array, cap: float) -> Array:
        """x = cap * tanh(x / cap)."""

    def linear(
        self, x: Array, weight: Weight, bias: Weight | None = None, add_to: Array | None = None
    ) -> Array:
        """x [T, K] @ weight[N, K].T + bias -> [T, N]. add_to [T, N]: accumulate there (+=) and
        return it instead of a new array (the residual)."""

    def linears(
        self, x: Array, weights: Sequence[Weight], biases: Sequence[Weight | None]
    ) -> tuple[Array, ...]:
        """linear of one x with several weights (q, k, v), in one pass over x."""

    def glu(
        self,
        x: Array,
        gate: Weight,
        up: Weight,
        activation: str,
        gate_bias: Weight | None = None,
        up_bias: Weight | None = None,
    ) -> Array:
        """activation(gate x) * (up x) -> [T, F]; activation "silu" or "gelu_tanh"."""

    def rope_angles(self, positions: Array, inv_freq: np.ndarray, scale: float) -> Array:
        """float32 [T, n, 2]: (cos, sin) of float32(position) * inv_freq[n], both times scale."""

    def rope_(self, x: Array, angles: Array, head_dim: int, layout: str) -> Array:
        """Rotate each head of x [T, H * head_dim] in place; n = angles.shape[1] pairs: "norm"
        (2i, 2i+1), "neox" (i, i + n). Dimensions past 2n pass through."""

    def store_kv(self, cache: Any, k: Array, v: Array, batch: Batch, group: int) -> None:
        """k [T, Hkv * d], v [T, Hkv * dv] to page pages[group][slot, position // page_tokens]."""

    def rope_store(
        self,
        q: Array,
        k: Array,
        v: Array,
        angles: Array,
        layout: str,
        cache: Any,
        batch: Batch,
        group: int,
        eps: float = 0.0,
        q_norm: Weight | None = None,
        k_norm: Weight | None = None,
    ) -> Array:
        """What comes between linears and attention: rms_norm of the heads of q and k, by those
        weights that are given; rope_ of both; store_kv of k and v. Returns the new q; what was
        in q and k is lost."""

    def attention(
        self,
        q: Array,
        cache: Any,
        batch: Batch,
        group: int,
        head_map: Sequence[int],
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Array:
        """q [T, H * d] over cache positions 0..positions[t] of each token's slot (store_kv of
        this step first) -> [T, H * dv]. Query head h reads local KV head head_map[h]. window W:
        only positions p with positions[t] - p < W. softcap c: scores = c * tanh(scores / c)."""

    def gather(self, x: Array, index: Array) -> Array:
        """x [T, D] rows at index int32[R] -> [R, D]."""

    def copy(self, x: Array) -> Array:
        """A scratch copy of x (taps)."""


def rope_store_in_parts(
    ops: Ops,
    vectors: tuple[Array, Array, Array],
    angles: Array,
    layout: str,
    store: tuple[Any, Batch, int],
    eps: float,
    norms: tuple[Weight | None, Weight | None],
    head_dim: int,
) -> Array:
    """Ops.rope_store by way of other Ops, which defines it. store: cache, batch and group."""
    q, k, v = vectors
    if norms[0] is not None:
        q = ops.rms_norm(q, norms[0], eps)
    if norms[1] is not None:
        k = ops.rms_norm(k, norms[1], eps)
    ops.rope_(q, angles, head_dim, layout)
    ops.rope_(k, angles, head_dim, layout)
    cache, batch, group = store
    ops.store_kv(cache, k, v, batch, group)
    return q


def slot_state(ops: Ops, slots: int, context: int, vocab: int = 1024) -> SlotState:
    """All slots running, greedy and without a limit. vocab: tokens that a mask has room for."""

    def filled(value: float, dtype: Any, *shape: int) -> Array:
        array = ops.zeros((slots, *shape), dtype)
        if value:
            ops.upload(array, np.full((slots, *shape), value, dtype))
        return array

    return SlotState(
        last_token=filled(0, np.int32),
        next_position=filled(0, np.int32),
        finished=filled(RUNNING, np.int32),
        max_position=filled(2**31 - 1, np.int32),
        stop_ids=filled(-1, np.int32, MAX_STOP_IDS),
        temperature=filled(0, np.float32),
        top_k=filled(0, np.int32),
        top_p=filled(1, np.float32),
        min_p=filled(0, np.float32),
        seed=filled(0, np.uint64),
        history=filled(0, np.int32, context),
        prompt_tokens=filled(0, np.int32),
        penalty_window=filled(0, np.int32),
        repetition_penalty=filled(1, np.float32),
        presence_penalty=filled(0, np.float32),
        frequency_penalty=filled(0, np.float32),
        bias_count=filled(0, np.int32),
        bias_ids=filled(0, np.int32, MAX_LOGIT_BIAS),
        bias_values=filled(0, np.float32, MAX_LOGIT_BIAS),
        logprobs=filled(-1, np.int32),
        masked=filled(0, np.int32),
        mask=filled(0, np.uint32, -(-vocab // 32)),
        forced=filled(-1, np.int32),
    )


def step_output(ops: Ops, rows: int) -> StepOutput:
    width, codes = 1 + MAX_LOGPROBS, ops.zeros((2, rows), np.int32)
    return StepOutput(
        codes=codes,
        tokens=codes[0],
        finish=codes[1],
        logprob_ids=ops.zeros((rows, width), np.int32),
        logprobs=ops.zeros((rows, width), np.float32),
    )
