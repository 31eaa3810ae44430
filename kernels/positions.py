"""PositionOps: what ranks need beyond Ops that share out keys and values by position.

Every rank keeps all KV heads of every `parts`-th run of `run` positions, lets all query heads see
what it keeps, and the ranks' answers are joined by their weights. A page of the gateway's tables is
then one run of each rank, so a table leads every rank to its own run. Shapes are those of ops.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from voltapile.kernels.ops import Array, Batch, Ops


@dataclass(frozen=True)
class Runs:
    """Of positions: this rank keeps the run number `part` of each `parts`."""

    part: int
    parts: int
    run: int  # positions


@dataclass(frozen=True)
class Kept:
    """A step's batch as a rank's own positions count. In `seen` a token stands at the last kept
    position that it sees (-1: it sees none), with the slot that it has; in `stored` so does a token
    whose keys are kept here, and all others are in the padding slot, the last one of the tables."""

    seen: Batch
    stored: Batch


class PositionOps(Ops, Protocol):
    def kept(self, batch: Batch, runs: Runs) -> Kept:
        """Both stay while the step does; what varies is read when this runs."""

    def attention_part(
        self,
        q: Array,
        cache: Any,
        seen: Batch,
        group: int,
        head_map: Sequence[int],
        scale: float,
        softcap: float = 0.0,
    ) -> tuple[Array, Array]:
        """attention over what is kept here, and log(sum(exp(score))) of it [T, H]; a token that
        sees nothing has zeros and -inf."""

    def weigh_(self, o: Array, weights: Array, all_weights: Array) -> Array:
        """o [T, H * dv], as a part of the whole: each head times exp(weights [T, H]) over the sum
        of exp(all_weights [T, parts * H]), which has every rank's weights side by side."""

    def take(self, x: Array, width: int, offset: int) -> Array:
        """[T, width]: columns of x from `offset` on."""
