"""All that a worker remembers between steps: keys and values, page tables, slots.

Sizes come from the Plan; everything is allocated once. Page 0 of each group is the trash page and
row `slots` of every table the padding slot: a padded row reads and writes there and harms nobody.
Which page or slot is free is the gateway's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from voltapile.kernels.ops import DONE_BEFORE, MAX_STOP_IDS, Array, Ops, SlotState
from voltapile.topology.plan import Plan
from voltapile.workers.protocol import Copy, Sampling

TRASH_PAGE = 0


@dataclass
class LayerKV:
    """The cache of one layer and the group whose page table leads into it."""

    kv: Any
    group: int


class Caches:
    def __init__(self, plan: Plan, ops: Ops) -> None:
        self.ops = ops
        self.padding_slot = plan.slots
        self.layers = _layers(plan, ops)
        self.tables: list[np.ndarray] = []  # the host's copy of pages
        for group in plan.caches:
            widest = -(-plan.context // group.page_tokens)
            self.tables.append(np.full((plan.slots + 1, widest), TRASH_PAGE, np.int32))
        self.pages: tuple[Array, ...] = tuple(ops.zeros(t.shape, np.int32) for t in self.tables)
        self.used = [np.zeros(plan.slots + 1, np.int32) for _ in plan.caches]
        self.state = _slot_state(plan.slots + 1, ops)
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

    def begin_request(self, slot: int, sampling: Sampling) -> None:
        """A new request's way of choosing tokens."""
        assert len(sampling.stop_ids) <= MAX_STOP_IDS, "too many stop ids"
        stop_ids = np.full(MAX_STOP_IDS, -1, np.int32)
        stop_ids[: len(sampling.stop_ids)] = sampling.stop_ids
        self.ops.upload(self.state.stop_ids[slot], stop_ids)
        values: tuple[tuple[Array, np.ndarray], ...] = (
            (self.state.finished, _one(0, np.int32)),
            (self.state.last_token, _one(0, np.int32)),
            (self.state.next_position, _one(0, np.int32)),
            (self.state.max_position, _one(sampling.max_position, np.int32)),
            (self.state.temperature, _one(sampling.temperature, np.float32)),
            (self.state.top_k, _one(sampling.top_k, np.int32)),
            (self.state.top_p, _one(sampling.top_p, np.float32)),
            (self.state.min_p, _one(sampling.min_p, np.float32)),
            (self.state.seed, _one(sampling.seed % 2**64, np.uint64)),
        )
        for array, value in values:
            self.ops.upload(array[slot : slot + 1], value)

    def copy(self, copy: Copy) -> None:
        """Copy a page of all layers of a group."""
        assert copy.kind == "page", f"cannot copy a {copy.kind}"
        for layer in self.layers:
            if layer.group == copy.group:
                self.ops.copy_page(layer.kv, copy.source, copy.target)


def _layers(plan: Plan, ops: Ops) -> list[LayerKV]:
    layers: dict[int, LayerKV] = {}
    for number, group in enumerate(plan.caches):
        for layer in group.layers:
            kv = ops.kv_cache(
                group.pages,
                group.kv_heads,
                group.page_tokens,
                group.key_dim,
                group.value_dim,
                group.key_type,
                group.value_type,
            )
            layers[layer] = LayerKV(kv, number)
    return [layers[i] for i in sorted(layers)]


def _slot_state(slots: int, ops: Ops) -> SlotState:
    return SlotState(
        last_token=ops.zeros((slots,), np.int32),
        next_position=ops.zeros((slots,), np.int32),
        finished=ops.zeros((slots,), np.int32),
        max_position=ops.zeros((slots,), np.int32),
        stop_ids=ops.zeros((slots, MAX_STOP_IDS), np.int32),
        temperature=ops.zeros((slots,), np.float32),
        top_k=ops.zeros((slots,), np.int32),
        top_p=ops.zeros((slots,), np.float32),
        min_p=ops.zeros((slots,), np.float32),
        seed=ops.zeros((slots,), np.uint64),
    )


def _one(value: float, dtype: Any) -> np.ndarray:
    return np.array([value], dtype)
