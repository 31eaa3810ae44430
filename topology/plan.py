"""Plan: what runs where and every byte it takes; the only configuration that crosses a process.

`plan()` is a pure function of (Spec, tensors, Machine, Backend, options). Workers allocate exactly
what the Plan says; running out of memory is a message here, before anything is loaded.

Two things stand outside what requests get. Page 0 of every cache group is the trash page: it counts
in `pages`, is never handed out, and takes what padding writes. Slot number `slots` is the padding
slot: slot arrays have slots + 1 rows, and the rows that fill up a captured step use the last one.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
from voltapile.shm.gguf import Tensor
from voltapile.topology.affinity import choose_cpus
from voltapile.topology.endpoint import default_endpoint
from voltapile.topology.machine import Machine
from voltapile.topology.memory import (
    PlanError,
    Sizes,
    copied_bytes,
    memory_of,
    resident_bytes,
    row_bytes,
    sizes,
)
from voltapile.topology.spec import CacheNeed, Spec

__all__ = ["Backend", "Options", "Plan", "PlanError", "from_json", "largest_context", "plan"]

DEFAULT_SLOTS = 4
LEAST_CONTEXT = 512  # a smaller one is only planned when asked for
CHUNK = 64  # prefill chunks end at multiples of it
STEPS_IN_FLIGHT = 2


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
    in_vram: bool = False  # weights and caches live in a GPU's memory
    workspace_bytes: int = 0  # scratch bytes beside what follows from the model's shapes
    unpacked_bytes: float = 0.0  # scratch bytes for each value of a layer's largest matrix
    choices: dict[str, str] = {}  # what changes bits, for the Plan's choices


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for; 0 means "choose"."""

    context: int = 0  # -c: tokens that one request may use
    slots: int = 0  # -np
    threads: int = 0  # -t
    batch_tokens: int = 512  # -b: most tokens of a Step
    cache_type_k: str = ""
    cache_type_v: str = ""
    margin_bytes: int = 256 << 20
    endpoint: str = ""  # ZeroMQ address of the gateway; "" means an ipc socket named by the Plan
    alias: str = ""  # the name that clients see; "" means the file's
    no_mmap: bool = False  # copy the weights into memory of huge pages instead of mapping the file


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tensor lives. tier: vram | pinned | host | mapped. split: none | rows | columns."""

    tier: str
    ranks: list[int]
    bytes: int
    type: str
    split: str = "none"


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of pages. A page holds page_tokens positions of all its layers; position p of a
    slot lies in the page number p // page_tokens of the slot's table, whatever the kind.

    Kind "window": a token at p reads positions p - window + 1 to p, so a row that starts at
    `start` needs the pages from `first_page(start)` on. Those before may belong to another slot
    already in the same Step: Steps run in order, and whatever read them has run. Their ids may
    stay in the table, and page 0 may stand there for those that a reused prefix does not have:
    nothing behind the window is read.
    """

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

    def first_page(self, start: int) -> int:
        """The number of the first page that a row which starts there reads."""
        return max(0, start - self.window + 1) // self.page_tokens if self.window else 0


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


class TensorTable(Protocol):
    """What planning needs of a Gguf."""

    @property
    def paths(self) -> Sequence[str]: ...

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...


def plan(
    spec: Spec, gguf: TensorTable, machine: Machine, backend: Backend, options: Options
) -> Plan:
    """The Plan of one rank, on the CPU or on the first GPU. Raises PlanError."""
    _check(options)
    warnings: list[str] = []
    tensors = _tensors(gguf, backend, options)
    node, cpus = choose_cpus(machine, options.threads, warnings)
    slots = options.slots or DEFAULT_SLOTS
    groups, budget = _budget(spec, gguf, machine, backend, options)
    context, columns = _context(spec, budget, slots, options, warnings)
    pages = budget.sizes.pages(columns)
    if options.batch_tokens < CHUNK + slots:
        warnings.append(
            f"-b {options.batch_tokens} has no room for {slots} slots beside a chunk of {CHUNK}"
        )
    rank = RankPlan(
        rank=0,
        device="cuda:0" if backend.in_vram else "cpu",
        node=node,
        cpus=cpus,
        threads=len(cpus),
        memory=budget.sizes.memory(columns, -(-context // budget.page_tokens)),
        mapped_bytes=sum(tensor.nbytes for tensor in gguf.tensors.values()),
    )
    rows = min(slots, backend.max_decode_rows) if backend.captures else 0
    return _sealed(
        Plan(
            model=[os.path.abspath(path) for path in gguf.paths],
            alias=options.alias or _alias(gguf.paths[0]),
            architecture=spec.architecture,
            backend=backend.name,
            endpoint=options.endpoint,
            context=context,
            slots=slots,
            batch_tokens=options.batch_tokens,
            buckets=list(range(1, rows + 1)),
            steps_in_flight=STEPS_IN_FLIGHT,
            answer_rank=0,
            ranks=[rank],
            caches=[
                msgspec.structs.replace(group, pages=count)
                for group, count in zip(groups, pages, strict=True)
            ],
            tensors=tensors,
            choices={
                "cache_type_k": groups[0].key_type,
                "cache_type_v": groups[0].value_type,
                "prefill_chunk": str(CHUNK),
                **backend.choices,
            },
            warnings=warnings,
        )
    )


def largest_context(
    spec: Spec, gguf: TensorTable, machine: Machine, backend: Backend, options: Options
) -> int:
    """Most tokens that one request could use here; 0 if the model does not fit at all."""
    _check(options)
    return _budget(spec, gguf, machine, backend, options)[1].largest


def plan_id(plan: Plan) -> str:
    """The digest of everything but the id. The default address carries the digest of a Plan without
    an address, so it stands for none."""
    bare = _digest(msgspec.structs.replace(plan, id="", endpoint=""))
    if not plan.endpoint or plan.endpoint.endswith(f"/{bare}.sock"):
        return bare
    return _digest(msgspec.structs.replace(plan, id=""))


def to_json(plan: Plan) -> bytes:
    return msgspec.json.encode(plan)


def from_json(data: bytes | str) -> Plan:
    """A Plan that `to_json` wrote, unchanged. Raises PlanError."""
    try:
        found = msgspec.json.decode(data, type=Plan)
    except msgspec.DecodeError as error:
        raise PlanError(f"not a plan: {error}") from None
    if found.version != 1:
        raise PlanError(f"found a plan of version {found.version}, expected 1")
    if found.id != plan_id(found):
        raise PlanError(f"plan {found.id} has been changed: its digest is {plan_id(found)}")
    return found


@dataclass(frozen=True)
class _Budget:
    """Memory against what it is needed for."""

    sizes: Sizes
    available: int  # margin taken off
    margin: int
    mapped: int
    page_tokens: int

    def columns(self, resident: bool) -> int:
        """Pages without a window that fit; resident: beside the file too."""
        left = self.available - self.sizes.fixed - (self.mapped if resident else 0)
        return self.sizes.columns(left)

    @property
    def largest(self) -> int:
        return self.columns(resident=False) * self.page_tokens


def _check(options: Options) -> None:
    """Numbers that a caller may have got wrong."""
    limits = {
        "-c": (options.context, 0),
        "-np": (options.slots, 0),
        "-t": (options.threads, 0),
        "-b": (options.batch_tokens, 1),
    }
    for option, (value, least) in limits.items():
        if not least <= value < 2**31:
            raise PlanError(f"{option} {value}: expected {least} to 2^31 - 1")


def _budget(
    spec: Spec, gguf: TensorTable, machine: Machine, backend: Backend, options: Options
) -> tuple[list[CacheGroup], _Budget]:
    default = next(iter(backend.kv_types))  # the backend lists the one it likes best first
    key_type, value_type = options.cache_type_k or default, options.cache_type_v or default
    groups = [_cache_group(need, backend, key_type, value_type) for need in spec.caches]
    slots = options.slots or DEFAULT_SLOTS
    mapped = sum(tensor.nbytes for tensor in gguf.tensors.values())
    owner, total, free = memory_of(machine, backend)
    if mapped > total:
        raise PlanError(
            f"the model's tensors take {_show(mapped)}, but {owner} has "
            f"{_show(total)} of memory in all: take a smaller model or quantisation"
        )
    tensors = gguf.tensors.values()
    copied = copied_bytes(tensors) if options.no_mmap else 0
    weights = resident_bytes(tensors) if backend.in_vram else copied
    found = sizes(spec, backend, groups, slots, options.batch_tokens, STEPS_IN_FLIGHT, weights)
    available = free - options.margin_bytes
    beside = 0 if weights else mapped
    return groups, _Budget(found, available, options.margin_bytes, beside, backend.page_tokens)


def _context(
    spec: Spec, budget: _Budget, slots: int, options: Options, warnings: list[str]
) -> tuple[int, int]:
    """Context of one request, and columns of pages: at least one full context, up to `slots` of
    them where memory allows, the mapped file's pages counted as taken."""
    beside_file = budget.columns(resident=True) * budget.page_tokens
    least = min(spec.context, LEAST_CONTEXT)
    if options.context:
        context = options.context
        if context > spec.context:
            warnings.append(f"-c {context} is more than the trained context of {spec.context}")
    else:
        context = min(spec.context, max(beside_file, least))
    if context > budget.largest:
        raise PlanError(_shortage(budget, context, options))
    if context > beside_file:
        warnings.append(
            f"the model's {_show(budget.mapped)} do not stay in memory beside the rest; parts of "
            "it will be read from disk again and again"
        )
    one = -(-context // budget.page_tokens)
    return context, max(one, min(slots * one, budget.columns(resident=True)))


def _shortage(budget: _Budget, context: int, options: Options) -> str:
    kv = budget.sizes.growing(-(-context // budget.page_tokens))
    needed = kv + budget.sizes.fixed
    advice = f"use -c {budget.largest} or less" if budget.largest else "use a smaller -b or -np"
    if budget.largest and not options.cache_type_k:
        advice += ", or a smaller cache type (-ctk, -ctv)"
    weights = f"weights {_show(budget.sizes.weights)}, " if budget.sizes.weights else ""
    if weights:
        advice += ", or no --no-mmap" if options.no_mmap else ", or -ngl 0 for the CPU"
    return (
        f"not enough memory: {_show(needed)} needed ({weights}cache for a context of {context} "
        f"{_show(kv)}, scratch {_show(budget.sizes.scratch)}, slots {_show(budget.sizes.slots)}, "
        f"reserve {_show(budget.sizes.reserve)}), but {_show(max(0, budget.available))} available "
        f"({_show(budget.margin)} kept free): {advice}"
    )


def _cache_group(need: CacheNeed, backend: Backend, key_type: str, value_type: str) -> CacheGroup:
    head = row_bytes(backend, "-ctk", key_type, need.key_dim)
    head += row_bytes(backend, "-ctv", value_type, need.value_dim)
    return CacheGroup(
        kind=need.kind,
        layers=list(need.layers),
        kv_heads=need.kv_heads,
        key_dim=need.key_dim,
        value_dim=need.value_dim,
        window=need.window,
        key_type=key_type,
        value_type=value_type,
        page_tokens=backend.page_tokens,
        page_bytes=backend.page_tokens * len(need.layers) * need.kv_heads * head,
        pages=0,
    )


def _tensors(gguf: TensorTable, backend: Backend, options: Options) -> dict[str, Placement]:
    """Every tensor is in VRAM, copied into host memory, or stays in the mapped file."""
    placed = {}
    tier = "vram" if backend.in_vram else "host" if options.no_mmap else "mapped"
    for name, tensor in gguf.tensors.items():
        if tensor.type_name not in backend.formats:
            raise PlanError(
                f"tensor {name!r} has type {tensor.type_name}, which the {backend.name} backend "
                f"cannot compute with; supported: {', '.join(backend.formats)}"
            )
        placed[name] = Placement(tier=tier, ranks=[0], bytes=tensor.nbytes, type=tensor.type_name)
    return placed


def _alias(path: str) -> str:
    return re.sub(r"(-00001-of-\d{5})?\.gguf$", "", Path(path).name)


def _sealed(unsealed: Plan) -> Plan:
    """With its id, and the address that follows from it."""
    found = plan_id(unsealed)
    endpoint = unsealed.endpoint or default_endpoint(found)
    return msgspec.structs.replace(unsealed, id=found, endpoint=endpoint)


def _digest(plan: Plan) -> str:
    return hashlib.sha256(msgspec.json.encode(plan, order="sorted")).hexdigest()[:16]


def _show(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
