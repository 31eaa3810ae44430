"""Makes Plans: a pure function of (Spec, tensors, Machine, Backend, Options).

Everything is decided here, before a byte is loaded; what does not fit is a message with numbers
and the option that would help. Knows no device and no file beyond its table of tensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
from voltapile.shm.gguf import Tensor
from voltapile.topology.budget import Budget, Pool, choose_context, show
from voltapile.topology.machine import Machine
from voltapile.topology.memory import (
    Load,
    Sizes,
    copied_bytes,
    memory_of,
    resident_bytes,
    row_bytes,
    sizes,
)
from voltapile.topology.parts import Part, part_of
from voltapile.topology.plan import (
    Backend,
    CacheGroup,
    Options,
    Placement,
    Plan,
    PlanError,
    RankPlan,
    sealed,
)
from voltapile.topology.ranks import (
    choose_mode,
    count_ranks,
    divide_cpus,
    proportions,
    shares,
    with_devices,
)
from voltapile.topology.share import Share
from voltapile.topology.spec import CacheNeed, Spec

DEFAULT_SLOTS = 4
CHUNK = 64  # prefill chunks end at multiples of it
STEPS_IN_FLIGHT = 2


class TensorTable(Protocol):
    """What planning needs of a Gguf."""

    @property
    def paths(self) -> Sequence[str]: ...

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...


def plan(
    spec: Spec, gguf: TensorTable, machine: Machine, backend: Backend, options: Options
) -> Plan:
    """The Plan of this model on that machine. Raises PlanError."""
    warnings: list[str] = []
    draft = _draft(spec, gguf, machine, backend, options, warnings)
    slots, budget = draft.slots, draft.budget
    context, columns = choose_context(spec, budget, slots, options, warnings)
    if options.batch_tokens < CHUNK + slots:
        warnings.append(
            f"-b {options.batch_tokens} has no room for {slots} slots beside a chunk of {CHUNK}"
        )
    rows = min(slots, backend.max_decode_rows) if backend.captures else 0
    counts = draft.sizes[0].pages(columns)
    return sealed(
        Plan(
            model=[os.path.abspath(path) for path in gguf.paths],
            alias=options.alias or _alias(gguf.paths[0]),
            architecture=spec.architecture,
            backend=backend.name,
            mode=draft.mode,
            endpoint=options.endpoint,
            context=context,
            slots=slots,
            batch_tokens=options.batch_tokens,
            buckets=list(range(1, rows + 1)),
            steps_in_flight=draft.steps_in_flight,
            answer_rank=len(draft.shares) - 1 if draft.mode == "layer" else 0,
            ranks=_ranks(draft, gguf, machine, backend, options, context, columns, warnings),
            caches=[
                msgspec.structs.replace(group, pages=count)
                for group, count in zip(draft.groups, counts, strict=True)
            ],
            tensors=_placements(gguf, draft, backend, options),
            choices={
                "cache_type_k": draft.groups[0].key_type,
                "cache_type_v": draft.groups[0].value_type,
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
    return _draft(spec, gguf, machine, backend, options, []).budget.largest


@dataclass(frozen=True)
class _Draft:
    """What is decided before the context."""

    mode: str
    devices: list[str]  # of each rank
    shares: list[Share]
    parts: list[dict[str, Part]]  # of each rank, by tensor
    slots: int
    steps_in_flight: int
    groups: list[CacheGroup]
    sizes: list[Sizes]
    budget: Budget


def _draft(
    spec: Spec,
    gguf: TensorTable,
    machine: Machine,
    backend: Backend,
    options: Options,
    warnings: list[str],
) -> _Draft:
    _check(options)
    _check_formats(gguf, backend)
    machine = with_devices(machine, backend, options)
    memory_of(machine, backend)
    count = count_ranks(machine, backend, options)
    given = proportions(options, count)
    places = [place for place, part in enumerate(given) if part]  # a part of 0 is no rank
    mode = choose_mode(options, len(places), warnings)
    found = shares(spec, gguf.tensors, mode, [given[place] for place in places])
    parts = [_parts(gguf, spec, share) for share in found]
    groups = _cache_groups(spec, backend, options)
    slots = options.slots or DEFAULT_SLOTS
    steps = 1 if mode == "layer" else STEPS_IN_FLIGHT
    load = Load(slots, options.batch_tokens, steps)
    needs = [
        sizes(spec, backend, groups, share, len(found), load, _weight_bytes(kept, backend, options))
        for share, kept in zip(found, parts, strict=True)
    ]
    pools = _pools(gguf, machine, backend, options, places, needs)
    budget = Budget(pools, options.margin_bytes, backend.page_tokens)
    devices = [f"cuda:{machine.gpus[i].index}" if backend.in_vram else "cpu" for i in places]
    return _Draft(mode, devices, found, parts, slots, steps, groups, needs, budget)


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


def _check_formats(gguf: TensorTable, backend: Backend) -> None:
    for name, tensor in gguf.tensors.items():
        if tensor.type_name not in backend.formats:
            raise PlanError(
                f"tensor {name!r} has type {tensor.type_name}, which the {backend.name} backend "
                f"cannot compute with; supported: {', '.join(backend.formats)}"
            )


def _parts(gguf: TensorTable, spec: Spec, share: Share) -> dict[str, Part]:
    """Tensors that a rank of this Share keeps something of."""
    parts = {name: part_of(tensor, spec, share) for name, tensor in gguf.tensors.items()}
    return {name: part for name, part in parts.items() if part.bytes}


def _weight_bytes(parts: Mapping[str, Part], backend: Backend, options: Options) -> int:
    """What a rank allocates for weights: everything in VRAM, a copy of everything, or a copy of the
    columns that it cuts out of the mapped file."""
    if backend.in_vram:
        return resident_bytes(part.bytes for part in parts.values())
    copied = [p.bytes for p in parts.values() if options.no_mmap or p.split == "columns"]
    return copied_bytes(copied) if copied else 0


def _pools(
    gguf: TensorTable,
    machine: Machine,
    backend: Backend,
    options: Options,
    places: Sequence[int],
    needs: Sequence[Sizes],
) -> list[Pool]:
    """The memories that ranks live in: one for all, or a GPU's for each."""
    tensors = sum(tensor.nbytes for tensor in gguf.tensors.values())
    lives = places if backend.in_vram else [0] * len(places)
    pools = []
    for home in sorted(set(lives)):
        owner, total, free = memory_of(machine, backend, home)
        ranks = tuple(need for need, place in zip(needs, lives, strict=True) if place == home)
        kept = tensors if len(set(lives)) == 1 else sum(each.weights for each in ranks)
        if kept > total:
            raise PlanError(
                f"the model's tensors take {show(kept)}, but {owner} has {show(total)} of memory "
                "in all: take a smaller model or quantisation"
            )
        beside = 0 if backend.in_vram or options.no_mmap else tensors
        pools.append(
            Pool(owner, total, free - options.margin_bytes, ranks, beside, backend.in_vram)
        )
    return pools


def _ranks(
    draft: _Draft,
    gguf: TensorTable,
    machine: Machine,
    backend: Backend,
    options: Options,
    context: int,
    columns: int,
    warnings: list[str],
) -> list[RankPlan]:
    homes = divide_cpus(machine, len(draft.shares), options.threads, warnings)
    pages = -(-context // backend.page_tokens)
    tensors = gguf.tensors
    return [
        RankPlan(
            rank=rank,
            share=share,
            page_bytes=list(need.page),
            device=device,
            node=node,
            cpus=cpus,
            threads=len(cpus),
            memory=need.memory(columns, pages),
            mapped_bytes=sum(tensors[name].nbytes for name in kept),
        )
        for rank, (share, need, kept, device, (node, cpus)) in enumerate(
            zip(draft.shares, draft.sizes, draft.parts, draft.devices, homes, strict=True)
        )
    ]


def _cache_groups(spec: Spec, backend: Backend, options: Options) -> list[CacheGroup]:
    default = next(iter(backend.kv_types))  # the backend lists the one it likes best first
    key_type, value_type = options.cache_type_k or default, options.cache_type_v or default
    return [_cache_group(need, backend, key_type, value_type) for need in spec.caches]


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


def _placements(
    gguf: TensorTable, draft: _Draft, backend: Backend, options: Options
) -> dict[str, Placement]:
    """Every tensor is in VRAM, copied into host memory, or stays in the mapped file."""
    tier = "vram" if backend.in_vram else "host" if options.no_mmap else "mapped"
    placed = {}
    for name, tensor in gguf.tensors.items():
        kept = [rank for rank, parts in enumerate(draft.parts) if name in parts]
        split = draft.parts[kept[0]][name].split if kept else "none"
        placed[name] = Placement(
            tier=tier, ranks=kept, bytes=tensor.nbytes, type=tensor.type_name, split=split
        )
    return placed


def _alias(path: str) -> str:
    return re.sub(r"(-00001-of-\d{5})?\.gguf$", "", Path(path).name)
