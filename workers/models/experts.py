"""A feed-forward net of routed experts, and one that every token takes."""

from __future__ import annotations

from typing import cast

import numpy as np
from voltapile.kernels.families import FamilyOps, SharedExpert, add_shared
from voltapile.kernels.ops import Array, Batch, Ops
from voltapile.topology.share import Share
from voltapile.topology.spec import Spec
from voltapile.workers.models.blocks import Weights


class ExpertFFN:
    """Every rank routes alike and computes its own experts; one sum over ranks at the end."""

    def __init__(self, spec: Spec, share: Share, weights: Weights, layer: int, ops: Ops) -> None:
        assert spec.experts is not None
        blk = f"blk.{layer}"
        self.ops, self.share, self.used = cast(FamilyOps, ops), share, spec.experts.used
        self.is_rounded = spec.experts.rounds_input
        self.ffn_gate_inp = weights(f"{blk}.ffn_gate_inp.weight")
        self.counts = ops.zeros((2, spec.experts.count), np.int64)
        self.table = None
        if share.experts[0] < share.experts[1] and share.expert_ffn[0] < share.expert_ffn[1]:
            gate, up = weights.fused(f"{blk}.ffn_gate_up_exps.weight") or (
                weights(f"{blk}.ffn_{name}_exps.weight") for name in ("gate", "up")
            )
            down = weights(f"{blk}.ffn_down_exps.weight")
            assert gate is not None
            assert up is not None
            self.table = self.ops.expert_table(gate, up, down, share.experts[0])
        self.shared = None
        gate_shexp = weights.optional(f"{blk}.ffn_gate_shexp.weight")
        if gate_shexp is not None:
            self.shared = SharedExpert(
                gate_shexp,
                weights(f"{blk}.ffn_up_shexp.weight"),
                weights(f"{blk}.ffn_down_shexp.weight"),
                weights.optional(f"{blk}.ffn_gate_inp_shexp.weight"),
            )

    def __call__(self, h: Array, batch: Batch, add_to: Array | None = None) -> Array:
        routing = self.ops.route(
            h, self.ffn_gate_inp, self.used, self.counts, batch, self.is_rounded
        )
        y = None if self.share.is_part else add_to
        if self.table is not None:
            y = self.ops.experts(h, routing, self.table, y, self.shared)
        elif self.shared is not None:
            y = add_shared(self.ops, h, self.shared, y)
        if self.share.is_part:
            return self.ops.all_reduce(y, h.shape, add_to)
        return y
