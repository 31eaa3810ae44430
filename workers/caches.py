"""All that a worker remembers between steps: keys and values, page tables, slots.

Sizes come from the Plan; everything is allocated once. Page 0 of each group is the trash page and
row `slots` of every table the padding slot: a padded row reads and writes there and harms nobody.
Which page or slot is free is the gateway's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from voltapile.kernels.families import FamilyOps
from voltapile.kernels.ops import (
    DONE_BEFORE,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    RUNNING,
    Array,
    Ops,
    slot_state,
)
from voltapile.topology.plan import CacheGroup, Plan
from voltapile.topology.share import Share
from voltapile.workers.protocol import Copy, Sampling, Want

TRASH_PAGE = 0


@dataclass
class LayerKV:
    """The cache of one layer and the group whose page table leads into it."""

    kv: Any  # None where this rank has no KV head, or the layer no keys
    group: int  # -1: of a layer without keys
    index: Any = None  # of a layer that chooses blocks


class Caches:
    def __init__(self, plan: Plan, ops: Ops, share: Share, vocab: int = 1024) -> None:
        self.ops = ops
        self.padding_slot = plan.slots
        self.layers = _layers(plan, ops, share)
        self.tables: list[np.ndarray] = []  # the host's copy of pages
        for group in plan.caches:
            widest = -(-plan.context // group.page_tokens)
            self.tables.append(np.full((plan.slots + 1, widest), TRASH_PAGE, np.int32))
        self.pages: tuple[Array, ...] = tuple(ops.zeros(t.shape, np.int32) for t in self.tables)
        self.used = [np.zeros(plan.slots + 1, np.int32) for _ in plan.caches]
        self.state = slot_state(ops, plan.slots + 1, plan.context, vocab)
        # Slots whose next token is bound, as the device has it.
        self._masked: set[int] = set()
        self._forced: set[int] = set()
        ops.upload(self.state.finished, np.full(plan.slots + 1, DONE_BEFORE, np.int32))

    def release(self, slot: int) -> None:
        """Forget a slot; its pages may belong to another one from now on."""
        for group, table in enumerate(self.tables):
            table[slot] = TRASH_PAGE
            self.used[group][slot] = 0
            self.ops.upload(self.pages[group][slot], table[slot])
        self.ops.upload(self.state.finished[slot : slot + 1], _one(DONE_BEFORE, np.int32))

    def append(self, slot: int, pages: list[list[int]]) -> None:
        """Append pages of each group to a slot's tables."""
        for group, new in enumerate(pages):
            if new:
                first = int(self.used[group][slot])
                last = first + len(new)
                assert last <= self.tables[group].shape[1], f"slot {slot} has too many pages"
                self.tables[group][slot, first:last] = new
                self.used[group][slot] = last
                self.ops.upload(
                    self.pages[group][slot, first:last], self.tables[group][slot, first:last]
                )

    def begin_request(self, slot: int, sampling: Sampling, want: Want | None = None) -> None:
        """A new request's way of choosing tokens, and what it wants to know of them."""
        assert len(sampling.stop_ids) <= MAX_STOP_IDS, "too many stop ids"
        assert len(sampling.logit_bias) <= MAX_LOGIT_BIAS, "too many biased tokens"
        logprobs = want.logprobs if want else -1
        assert logprobs <= MAX_LOGPROBS, "too many alternatives"
        stop_ids = np.full(MAX_STOP_IDS, -1, np.int32)
        stop_ids[: len(sampling.stop_ids)] = sampling.stop_ids
        state, bias = self.state, sampling.logit_bias
        self.ops.upload(state.stop_ids[slot], stop_ids)
        if bias:
            self.ops.upload(state.bias_ids[slot], np.fromiter(bias.keys(), np.int32))
            self.ops.upload(state.bias_values[slot], np.fromiter(bias.values(), np.float32))
        values: tuple[tuple[Array, float, Any], ...] = (
            (state.finished, RUNNING, np.int32),
            (state.last_token, 0, np.int32),
            (state.next_position, 0, np.int32),
            (state.max_position, sampling.max_position, np.int32),
            (state.temperature, sampling.temperature, np.float32),
            (state.top_k, sampling.top_k, np.int32),
            (state.top_p, sampling.top_p, np.float32),
            (state.min_p, sampling.min_p, np.float32),
            (state.seed, sampling.seed % 2**64, np.uint64),
            (state.prompt_tokens, sampling.prompt_tokens, np.int32),
            (state.penalty_window, sampling.penalty_window, np.int32),
            (state.repetition_penalty, sampling.repetition_penalty, np.float32),
            (state.presence_penalty, sampling.presence_penalty, np.float32),
            (state.frequency_penalty, sampling.frequency_penalty, np.float32),
            (state.bias_count, len(bias), np.int32),
            (state.logprobs, logprobs, np.int32),
        )
        for array, value, dtype in values:
            self.ops.upload(array[slot : slot + 1], _one(value, dtype))

    def bind(self, slot: int, mask: np.ndarray | None, forced: int) -> None:
        """The next token is one of the mask's, or `forced`; None and -1 leave it free."""
        state = self.state
        if mask is not None:
            assert len(mask) <= state.mask.shape[1], f"a mask of {len(mask)} words"
            self.ops.upload(state.mask[slot], np.asarray(mask, np.uint32))
        _flag(self.ops, state.masked, self._masked, slot, mask is not None, 1, 0)
        if forced >= 0:
            self._forced.discard(slot)  # it may be another one now
        _flag(self.ops, state.forced, self._forced, slot, forced >= 0, forced, -1)

    def take_sampled(self, source: int) -> None:
        """What a rank has sampled, to all: each slot's last token, its position, and its end."""
        for array in (self.state.last_token, self.state.next_position, self.state.finished):
            self.ops.broadcast_(array, source)

    def remember(self, slot: int, history: np.ndarray) -> None:
        """The tokens of a prefix whose pages were computed for somebody else."""
        self.ops.upload(self.state.history[slot], history)

    def copy(self, copy: Copy) -> None:
        """Copy a page of all layers of a group."""
        assert copy.kind == "page", f"cannot copy a {copy.kind}"
        for layer in self.layers:
            if layer.group == copy.group and layer.kv is not None:
                self.ops.copy_page(layer.kv, copy.source, copy.target)


def _layers(plan: Plan, ops: Ops, share: Share) -> list[LayerKV]:
    """Of this rank's layers, in order, its own KV heads, or its own run of each page."""
    kv_heads = share.kv_heads[1] - share.kv_heads[0]
    parts = share.kv_runs.parts if share.kv_runs else 1
    layers: dict[int, LayerKV] = {}
    for number, group in enumerate(plan.caches):
        for layer in set(group.layers) & set(share.layers):
            kv = None
            if kv_heads:
                kv = ops.kv_cache(
                    group.pages,
                    kv_heads,
                    group.page_tokens // parts,
                    group.key_dim,
                    group.value_dim,
                    group.key_type,
                    group.value_type,
                )
            index = None
            if group.kind == "qsa":
                index = _index_cache(ops, group)
            layers[layer] = LayerKV(kv, number, index)
    return [layers.get(i) or LayerKV(None, -1) for i in share.layers]


def _index_cache(ops: Ops, group: CacheGroup) -> Any:
    family = cast(FamilyOps, ops)
    return family.index_cache(group.pages, group.page_tokens, group.index_dim, group.index_block)


def _flag(
    ops: Ops, array: Array, known: set[int], slot: int, holds: bool, value: int, none: int
) -> None:
    """Tell the device only what it does not know."""
    if holds != (slot in known):
        ops.upload(array[slot : slot + 1], _one(value if holds else none, np.int32))
        (known.add if holds else known.discard)(slot)


def _one(value: float, dtype: Any) -> np.ndarray:
    return np.array([value], dtype)
