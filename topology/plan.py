"""Plan: what runs where and every byte it takes; the only configuration that crosses a process.

`plan()` is a pure function of (Spec, tensors, Machine, Backend, options). Workers allocate exactly
what the Plan says; running out of memory is a message here, before anything is loaded.
"""

from __future__ import annotations

import msgspec


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """A plain description that kernels provides of one implementation of Ops."""

    name: str  # "reference" | "cpu" | "cuda"
    formats: list[str]  # tensor types that it can multiply with, e.g. "Q4_K"
    kv_types: dict[str, tuple[int, int]]  # name -> (values per block, bytes per block)
    page_tokens: int
    max_decode_rows: int  # rows that the row-invariant engine takes in one captured step
    activation_bytes: float  # scratch bytes for each value of a linear's input, its copies included
    reserve_bytes: int  # what the process itself holds: interpreter, libraries, thread stacks
    captures: bool


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for; 0 means "choose"."""

    context: int = 0  # -c: tokens that one request may use
    slots: int = 0  # -np
    threads: int = 0  # -t
    batch_tokens: int = 512  # -b: most tokens of a Step
    cache_type_k: str = ""
    cache_type_v: str = ""
    margin_bytes: int = 256 << 20
    endpoint: str = ""  # ZeroMQ address of the gateway; "" means an ipc socket of its own


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tensor lives. tier: vram | pinned | host | mapped. split: none | rows | columns."""

    tier: str
    ranks: list[int]
    bytes: int
    type: str
    split: str = "none"


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of pages. A page holds page_tokens positions of all its layers."""

    kind: str
    layers: list[int]
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    key_type: str
    value_type: str
    page_tokens: int
    page_bytes: int
    pages: int


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process. memory: bytes by purpose (weights, kv, scratch, slots, reserve ...)."""

    rank: int
    device: str
    node: int
    cpus: list[int]
    threads: int
    memory: dict[str, int]
    mapped_bytes: int  # of the model file; shared page cache, not counted in memory


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """See the module. id: a digest of everything else, so that two sides can compare."""

    version: int = 1
    id: str = ""
    model: list[str]  # paths of the file's shards
    alias: str  # the name that clients see
    architecture: str
    backend: str
    endpoint: str
    context: int
    slots: int
    batch_tokens: int
    buckets: list[int]  # captured decode sizes in rows
    steps_in_flight: int
    answer_rank: int
    ranks: list[RankPlan]
    caches: list[CacheGroup]
    tensors: dict[str, Placement]
    choices: dict[str, str] = {}  # everything that changes bits, named
    warnings: list[str] = []
