"""What a model takes beside its weights, in bytes: pure arithmetic over Spec, Backend, Options.

Upper bounds, because workers allocate what the Plan says and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from voltapile.topology.spec import Spec

if TYPE_CHECKING:
    from voltapile.topology.plan import Backend, CacheGroup

SLOT_BYTES = 8704  # one slot's state (8,324 bytes in use: a bias takes 8,192) and answer (176)
TOKEN_BYTES = 64  # one token's fields in the step's input, on the host and on the device
ALLOCATION_BYTES = 64  # alignment of each scratch array
LAYER_ARRAYS = 64  # more than a layer and the ends of a step allocate


class PlanError(ValueError):
    """What was asked for does not fit or is not supported; names the option that would help."""


@dataclass(frozen=True)
class Sizes:
    """Bytes that depend on neither the context nor the number of pages, and those that do."""

    scratch: int
    slots: int
    reserve: int
    page: int  # one page of every cache group
    table: int  # one more page in every slot's tables
    history: int  # the tokens of one more page in every slot

    @property
    def column(self) -> int:
        """One more page of every group, for as long as it makes the context longer."""
        return self.page + self.table + self.history

    @property
    def fixed(self) -> int:
        return self.scratch + self.slots + self.reserve


def sizes(spec: Spec, backend: Backend, caches: list[CacheGroup], slots: int, batch: int) -> Sizes:
    """caches: groups whose pages are not counted yet."""
    return Sizes(
        scratch=scratch_bytes(spec, backend, batch, slots),
        slots=(slots + 1) * SLOT_BYTES + (batch + slots) * TOKEN_BYTES,
        reserve=backend.reserve_bytes,
        page=sum(group.page_bytes for group in caches),
        table=2 * 4 * (slots + 1) * len(caches),  # int32, on the host and on the device
        history=4 * (slots + 1) * backend.page_tokens,
    )


def scratch_bytes(spec: Spec, backend: Backend, batch: int, slots: int) -> int:
    """Most scratch memory of a step of T tokens and R sampled rows, all arrays float32.

    A = backend.activation_bytes: what a linear's input costs again in the backend's own form.
    Of one layer, everything lives until its end; the next layer takes the same place.

        ends    4 T (D + rope) + (4 + A) T D + 4 T D    residual, angles, sampled rows, their norm
                + 2 * 4 R V                             logits, and the sampler's copy
        layer   2 (4 + A) T D                           two norms
                + 4 T (q + k + v) + (4 + A) T o         projections, attention's output
                + 4 T H (v_dim + 2)                     attention's partial sums
                + 2 * 4 T F + (4 + A) T F               gate, up, their product

    q, o = H * key_dim, H * value_dim; k, v alike for KV heads; F = ffn. R is slots, but a prompt's
    probabilities take hidden rows of all T tokens, so the ends count T of them.
    """
    tokens = max(batch, slots)
    own = 4.0 + backend.activation_bytes
    q, o = spec.heads * spec.key_dim, spec.heads * spec.value_dim
    kv = spec.kv_heads * (spec.key_dim + spec.value_dim)
    ends = 4 * (spec.width + spec.rope.dims) + own * spec.width + 4 * spec.width
    layer = 2 * own * spec.width + 4 * (q + kv) + own * o + 8 * spec.ffn + own * spec.ffn
    partials = 4 * spec.heads * (spec.value_dim + 2)
    logits = 8 * slots * spec.vocab
    whole = tokens * (ends + layer + partials) + logits
    return int(whole) + LAYER_ARRAYS * ALLOCATION_BYTES


def row_bytes(backend: Backend, option: str, type_name: str, dim: int) -> int:
    """One head's keys or values at one position."""
    if type_name not in backend.kv_types:
        known = ", ".join(backend.kv_types)
        raise PlanError(
            f"{option} {type_name}: the {backend.name} backend has no such cache type; "
            f"supported: {known}"
        )
    length, nbytes = backend.kv_types[type_name]
    if dim % length:
        raise PlanError(
            f"{option} {type_name}: heads of {dim} values are no multiple of its block of {length}"
        )
    return dim // length * nbytes
