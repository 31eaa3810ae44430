"""A launch of csrc/matmul_stream.cu: how a product is dealt (stream.py), and what it reads.

A late norm is taken apart here, so that the product norms what it reads. Takes a Launcher; knows
neither cupy nor which products there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from voltapile.kernels.cuda import stream
from voltapile.kernels.cuda.launch import DeviceArray, Instance, Launcher
from voltapile.kernels.cuda.norms import late_norm


@dataclass(frozen=True)
class Streaming:
    """x: where it reads; rows are normed on the way by `gain` and `eps`, if that is not 0."""

    task: stream.Task
    deal: stream.Deal
    x: int
    gain: int = 0
    eps: float = 0.0

    def launch(
        self,
        ops: Launcher,
        kind: Instance,
        epilogue: int,
        others: int,
        matrices: Sequence[int | np.int32],
        tail: Sequence[int | np.int32 | np.float32],
    ) -> None:
        """others, matrices: as stream.placed; tail: what `kind` is told beside that."""
        task, deal = self.task, self.deal
        placed, ends = stream.placed(task, others, matrices)
        numbers = task.columns, task.tokens, epilogue, *ends, deal.first_other, deal.depth
        shares = np.float32(self.eps), np.float32(1) / np.float32(task.columns)
        ops.kernel(kind)(
            (deal.blocks,),
            deal.threads,
            (*placed, self.x, *map(np.int32, numbers), self.gain, *shares, *tail),
            shared=deal.shared,
        )


def streaming(
    ops: Launcher, x: DeviceArray, task: stream.Task, norms: bool = True
) -> Streaming | None:
    """None if it is no product for matmul_stream.cu. norms: whether it may norm x."""
    if ops.arch < stream.ARCH:
        return None
    norm = late_norm(x) if norms else None
    deal = None if norm is None else stream.deal(replace(task, is_normed=True))
    if norm is not None and deal is not None:
        return Streaming(task, deal, norm.x.ptr, norm.weight.ptr, norm.eps)
    deal = stream.deal(task)
    return None if deal is None else Streaming(task, deal, x.ptr)
