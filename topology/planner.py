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
from voltapile.topology.affinity import choose_cpus
from voltapile.topology.machine import Machine
from voltapile.topology.memory import (
    Sizes,
    copied_bytes,
    memory_of,
    resident_bytes,
    row_bytes,
    sizes,
)
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
from voltapile.topology.share import whole
from voltapile.topology.spec import CacheNeed, Spec

DEFAULT_SLOTS = 4
LEAST_CONTEXT = 512  # a smaller one is only planned when asked for
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
        share=whole(spec),
        page_bytes=[group.page_bytes for group in groups],
        device="cuda:0" if backend.in_vram else "cpu",
        node=node,
        cpus=cpus,
        threads=len(cpus),
        memory=budget.sizes.memory(columns, -(-context // budget.page_tokens)),
        mapped_bytes=sum(tensor.nbytes for tensor in gguf.tensors.values()),
    )
    rows = min(slots, backend.max_decode_rows) if backend.captures else 0
    return sealed(
        Plan(
            model=[os.path.abspath(path) for path in gguf.paths],
            alias=options.alias or _alias(gguf.paths[0]),
            architecture=spec.architecture,
            backend=backend.name,
            mode="single",
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


def _show(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
