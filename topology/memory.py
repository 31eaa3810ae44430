"""What a model takes beside its weights, in bytes: pure arithmetic over Spec, Backend, Options.

Upper bounds, because workers allocate what the Plan says and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from voltapile.topology.plan import PlanError
from voltapile.topology.spec import Spec

if TYPE_CHECKING:
    from voltapile.topology.machine import Machine
    from voltapile.topology.plan import Backend, CacheGroup
    from voltapile.topology.share import Share

SLOT_BYTES = 8704  # one slot's state (8,324 bytes in use: a bias takes 8,192) and answer (176)
TOKEN_BYTES = 64  # one token's fields in the step's input, on the host and on the device
ALLOCATION_BYTES = 64  # alignment of each scratch array
LAYER_ARRAYS = 64  # more than a layer and the ends of a step allocate
VRAM_BLOCK = 64 << 20  # shared by small tensors
VRAM_PIECE = 2 << 20  # of which the driver hands out whole numbers
COPY_SLACK = 128  # behind a tensor copied into host memory: bytes that kernels may read past it
HUGE_PAGE = 2 << 20
VRAM_SLACK = 512  # behind a tensor: alignment, and bytes that kernels may read past it
LONGEST_BLOCK = 256  # values of a quantisation block, of which ranks may share one
MOST_COLUMNS = 2**26  # more pages than any memory holds


@dataclass(frozen=True)
class Sizes:
    """Bytes that depend on neither the context nor the number of pages, and those that do.

    Pages of all groups follow from one number, `columns`: how many a group without a window gives
    out. One with a window gives out as many, but never more than its slots can hold at once.
    """

    scratch: int
    slots: int
    reserve: int
    page: tuple[int, ...]  # of each cache group
    most: tuple[int, ...]  # pages that each group can use
    table: int  # one more page in every slot's tables
    history: int  # the tokens of one more page in every slot
    weights: int = 0  # in VRAM or copied; what stays in the mapped file does not count
    communication: int = 0  # what other ranks write to this one

    @property
    def fixed(self) -> int:
        return self.weights + self.scratch + self.slots + self.communication + self.reserve

    def pages(self, columns: int) -> list[int]:
        """Of each group, the trash page included."""
        return [1 + min(columns, most) for most in self.most]

    def kv(self, columns: int) -> int:
        return sum(n * size for n, size in zip(self.pages(columns), self.page, strict=True))

    def growing(self, columns: int) -> int:
        """What pages, tables and histories of so long a context take."""
        return self.kv(columns) + (columns + 1) * (self.table + self.history)

    def memory(self, columns: int, context: int) -> dict[str, int]:
        """Bytes by purpose, for a context of so many pages."""
        found = {
            "weights": self.weights,
            "kv": self.kv(columns),
            "scratch": self.scratch,
            "slots": self.slots + (columns + 1) * self.table + context * self.history,
            "communication": self.communication,
            "reserve": self.reserve,
        }
        if not self.communication:
            del found["communication"]  # alone
        return found


def sizes(
    spec: Spec,
    backend: Backend,
    caches: list[CacheGroup],
    share: Share,
    ranks: int,
    slots: int,
    batch: int,
    steps_in_flight: int,
    weights: int,
) -> Sizes:
    """Of one of `ranks` ranks. caches: groups whose pages are not counted yet."""
    return Sizes(
        scratch=scratch_bytes(spec, backend, share, batch, slots),
        slots=(slots + 1) * SLOT_BYTES + (batch + slots) * TOKEN_BYTES,
        reserve=backend.reserve_bytes,
        page=tuple(page_bytes(group, share) for group in caches),
        most=tuple(_most_pages(group, slots, steps_in_flight * batch) for group in caches),
        table=2 * 4 * (slots + 1) * len(caches),  # int32, on the host and on the device
        history=4 * (slots + 1) * backend.page_tokens,
        weights=weights,
        communication=ranks * backend.group_bytes if ranks > 1 else 0,
    )


def page_bytes(group: CacheGroup, share: Share) -> int:
    """Of one page of the group, what lies with a rank of this Share: its layers' and KV heads'."""
    layers = len(set(group.layers) & set(share.layers))
    kv_heads = share.kv_heads[1] - share.kv_heads[0]
    return group.page_bytes // (len(group.layers) * group.kv_heads) * layers * kv_heads


def _most_pages(group: CacheGroup, slots: int, tokens: int) -> int:
    """Pages that `slots` requests can use while `tokens` tokens of theirs are in flight.

    A window and n tokens touch at most ceil(window / page) + ceil(n / page) + 2 pages. Each slot
    gets as many as a window touches once more, for the ends of prefixes that are kept.
    """
    if not group.window:
        return MOST_COLUMNS
    window = -(-group.window // group.page_tokens)
    return slots * (2 * window + 3) + -(-tokens // group.page_tokens)


def scratch_bytes(spec: Spec, backend: Backend, share: Share, batch: int, slots: int) -> int:
    """Most scratch memory of a step of T tokens and R sampled rows, all arrays float32.

    A = backend.activation_bytes: what a linear's input costs again in the backend's own form.
    A layer's attention and its FFN take turns in the same place. Heads and columns are those of the
    rank's Share; V' = its rows of the output matrix.

        ends    4 T (D + rope) + (4 + A) T D + 4 T D    residual, angles, sampled rows, their norm
                + 4 R (2 V + V')                        logits, the sampler's copy, the rank's part
        attention (4 + A) T D                           norm
                + 4 T (2 q + 2 k + v) + (4 + A) T o     projections, norms of heads, output
                + (4 + A) T o'                          output within whole blocks of columns
                + 4 T H (v_dim + 2) + 4 T D             partial sums, output before its norm
        FFN     (4 + A) T D                             norm
                + 2 * 4 T F + (4 + A) T F + 4 T D       gate, up, their product, output

    q, o = H * key_dim, H * value_dim; k, v alike for KV heads; F = ffn. R is slots, but a prompt's
    probabilities take hidden rows of all T tokens, so the ends count T of them.
    """
    tokens = max(batch, slots)
    own = 4.0 + backend.activation_bytes
    heads, kv_heads, ffn, vocab = (
        end - begin for begin, end in (share.heads, share.kv_heads, share.ffn, share.vocab)
    )
    is_part = heads < spec.heads or ffn < spec.ffn
    q, k = heads * spec.key_dim, kv_heads * spec.key_dim
    o, v = heads * spec.value_dim, kv_heads * spec.value_dim
    ropes = spec.rope.dims + (spec.rope_window.dims if spec.rope_window else 0)
    ends = 4 * (spec.width + ropes) + own * spec.width + 4 * spec.width
    attention = own * spec.width + 4 * (2 * q + 2 * k + v) + own * o
    attention += own * (o + LONGEST_BLOCK) if is_part else 0
    attention += 4 * heads * (spec.value_dim + 2) + 4 * spec.width
    feed_forward = own * spec.width + 8 * ffn + own * ffn + 4 * spec.width
    rows = slots * (2 * spec.vocab + (vocab if is_part else 0)) if share.answers else 0
    whole = tokens * (ends + max(attention, feed_forward)) + 4 * rows
    unpacked = backend.unpacked_bytes * spec.width * max(ffn, q, o)
    return int(whole + unpacked) + LAYER_ARRAYS * ALLOCATION_BYTES + backend.workspace_bytes


def memory_of(machine: Machine, backend: Backend, device: int = 0) -> tuple[str, int, int]:
    """(whose, all bytes, free bytes) of the memory that a rank lives in."""
    if not backend.in_vram:
        return "this machine", machine.memory_bytes, machine.available_bytes
    if not machine.gpus:
        raise PlanError(f"--backend {backend.name}: this machine has no GPU that the driver shows")
    gpu = machine.gpus[device]
    return f"GPU {gpu.index} ({gpu.name})", gpu.memory_bytes, gpu.free_bytes


def resident_bytes(sizes: Iterable[int]) -> int:
    """What tensors of these sizes take in VRAM: small ones share blocks, a large one is a whole
    number of the driver's pieces."""
    small = large = 0
    for size in sizes:
        nbytes = size + VRAM_SLACK
        if nbytes < VRAM_BLOCK // 4:
            small += nbytes
        else:
            large += -(-nbytes // VRAM_PIECE) * VRAM_PIECE
    # All blocks but the last are three quarters full at least.
    return large + (small * 4 // (3 * VRAM_BLOCK) + 1) * VRAM_BLOCK


def copied_bytes(sizes: Iterable[int]) -> int:
    """What a copy of tensors of these sizes takes in host memory, in huge pages; one of them to
    spare, since tensors that are copied in parts take a little more."""
    return (-(-sum(map(copied_size, sizes)) // HUGE_PAGE) + 1) * HUGE_PAGE


def copied_size(nbytes: int) -> int:
    """The distance from a copied tensor to the next: kernels may read a little past its end."""
    return -(-(nbytes + COPY_SLACK) // 64) * 64


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
