"""What a model takes beside its weights, in bytes: pure arithmetic over Spec, Backend, Options.

Upper bounds, because workers allocate what the Plan says and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from voltapile.topology.plan import OptionError
from voltapile.topology.scratch import counter_bytes, scratch_bytes, state_bytes
from voltapile.topology.spec import Spec

if TYPE_CHECKING:
    from voltapile.topology.machine import Machine
    from voltapile.topology.plan import Backend, CacheGroup
    from voltapile.topology.share import Share

SLOT_BYTES = 8704  # one slot's state (8,324 bytes in use: a bias takes 8,192) and answer (176)
TOKEN_BYTES = 64  # one token's fields in the step's input, on the host and on the device
VRAM_BLOCK = 64 << 20  # shared by small tensors
VRAM_PIECE = 2 << 20  # of which the driver hands out whole numbers
COPY_SLACK = 128  # behind a tensor copied into host memory: bytes that kernels may read past it
HUGE_PAGE = 2 << 20
VRAM_SLACK = 512  # behind a tensor: alignment, and bytes that kernels may read past it
ALWAYS = ("weights", "kv", "scratch", "slots", "reserve")  # are told of, even where they are 0
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
    state: int = 0  # of all slots, beside their pages
    communication: int = 0  # what other ranks write to this one
    checkpoints: int = 0  # copies of slots' states
    staging: int = 0  # where rows of a table in the file arrive

    @property
    def fixed(self) -> int:
        own = self.weights + self.state + self.scratch + self.slots + self.checkpoints
        return own + self.communication + self.staging + self.reserve

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
            "state": self.state,
            "scratch": self.scratch,
            "slots": self.slots + (columns + 1) * self.table + context * self.history,
            "checkpoints": self.checkpoints,
            "communication": self.communication,
            "staging": self.staging,
            "reserve": self.reserve,
        }
        return {name: nbytes for name, nbytes in found.items() if nbytes or name in ALWAYS}


@dataclass(frozen=True)
class Load:
    """What a step is made for."""

    slots: int
    batch: int  # most tokens of a step
    steps_in_flight: int
    checkpoints: int = 0  # of slots' states


def sizes(
    spec: Spec,
    backend: Backend,
    caches: Sequence[CacheGroup],
    share: Share,
    ranks: int,
    load: Load,
    weights: int,
    host_layers: Collection[int] = (),
) -> Sizes:
    """Of one of `ranks` ranks, in the memory that it computes in. caches: groups whose pages are
    not counted yet; host_layers: those whose pages are not here."""
    slots, batch = load.slots, load.batch
    here = [layer for layer in share.layers if layer not in host_layers]
    return Sizes(
        scratch=scratch_bytes(spec, backend, share, batch, slots),
        slots=(slots + 1) * (SLOT_BYTES + mask_bytes(spec))
        + (batch + slots) * TOKEN_BYTES
        + counter_bytes(spec, share),
        reserve=backend.reserve_bytes,
        page=tuple(page_bytes(group, share, here) for group in caches),
        most=_most(caches, load),
        table=2 * 4 * (slots + 1) * len(caches),  # int32, on the host and on the device
        history=4 * (slots + 1) * backend.page_tokens,
        weights=weights,
        state=(slots + 1) * state_bytes(spec, share),
        communication=ranks * backend.group_bytes if ranks > 1 else 0,
        checkpoints=0 if backend.in_vram else checkpoint_bytes(spec, share, load.checkpoints),
    )


def mask_bytes(spec: Spec) -> int:
    """A bit for each token that a slot may choose."""
    return 4 * -(-spec.vocab // 32)


def checkpoint_bytes(spec: Spec, share: Share, count: int) -> int:
    """Of so many, and the place that a rank has for itself; none, none either."""
    return (count + 1) * state_bytes(spec, share)


def host_sizes(
    spec: Spec,
    backend: Backend,
    caches: Sequence[CacheGroup],
    share: Share,
    load: Load,
    weights: int,
    host_layers: Collection[int],
    staging: int,
) -> Sizes:
    """Of a rank that computes in VRAM: what it keeps in the host's memory."""
    there = [layer for layer in share.layers if layer in host_layers]
    return Sizes(
        scratch=0,
        slots=0,
        reserve=backend.host_reserve_bytes,
        page=tuple(page_bytes(group, share, there) for group in caches),
        most=_most(caches, load),
        table=0,
        history=0,
        weights=weights,
        checkpoints=checkpoint_bytes(spec, share, load.checkpoints),
        staging=staging,
    )


def page_bytes(group: CacheGroup, share: Share, layers: Sequence[int]) -> int:
    """Of one page of the group, what a rank of this Share keeps of these layers: its KV heads'."""
    count = len(set(group.layers) & set(layers))
    heads = group.page_bytes // len(group.layers) - group.index_bytes
    kv_heads = share.kv_heads[1] - share.kv_heads[0]
    own = heads // group.kv_heads * kv_heads // (share.kv_runs.parts if share.kv_runs else 1)
    return count * (own + group.index_bytes)


def _most(caches: Sequence[CacheGroup], load: Load) -> tuple[int, ...]:
    tokens = load.steps_in_flight * load.batch
    return tuple(_most_pages(group, load.slots, tokens) for group in caches)


def _most_pages(group: CacheGroup, slots: int, tokens: int) -> int:
    """Pages that `slots` requests can use while `tokens` tokens of theirs are in flight.

    A window and n tokens touch at most ceil(window / page) + ceil(n / page) + 2 pages. Each slot
    gets as many as a window touches once more, for the ends of prefixes that are kept.
    """
    if not group.window:
        return MOST_COLUMNS
    window = -(-group.window // group.page_tokens)
    return slots * (2 * window + 3) + -(-tokens // group.page_tokens)


def memory_of(machine: Machine, backend: Backend, device: int = 0) -> tuple[str, int, int]:
    """(whose, all bytes, free bytes) of the memory that a rank lives in."""
    if not backend.in_vram:
        return "this machine", machine.memory_bytes, machine.available_bytes
    if not machine.gpus:
        raise OptionError(
            f"--backend {backend.name}: this machine has no GPU that the driver shows"
        )
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
        raise OptionError(
            f"{option} {type_name}: the {backend.name} backend has no such cache type; "
            f"supported: {known}"
        )
    length, nbytes = backend.kv_types[type_name]
    if dim % length:
        raise OptionError(
            f"{option} {type_name}: heads of {dim} values are no multiple of its block of {length}"
        )
    return dim // length * nbytes
