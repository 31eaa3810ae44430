"""Draft: one way of computing a model on a machine, with all memory counted; and its Plan.

Knows one way of spreading the model over ranks; planner.py chooses between several.
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
from voltapile.topology.budget import Budget, ShortageError, choose_context, show
from voltapile.topology.choices import chosen
from voltapile.topology.layout import Layout, layout_of
from voltapile.topology.machine import Machine
from voltapile.topology.memory import Load, memory_of, row_bytes
from voltapile.topology.overrides import Obeyed, Rule, faults, obey, rules_of
from voltapile.topology.placement import (
    SHARED_ROOM,
    TABLE,
    Places,
    by_rules,
    fit,
    usual_places,
)
from voltapile.topology.plan import (
    INDEX_RING,
    Backend,
    CacheGroup,
    OptionError,
    Options,
    Override,
    Placement,
    Plan,
    RankPlan,
)
from voltapile.topology.ranks import Spread, divide_cpus
from voltapile.topology.scratch import state_bytes
from voltapile.topology.spec import CacheNeed, Spec

DEFAULT_SLOTS = 4
CHUNK = 64  # prefill chunks end at multiples of it
STEPS_IN_FLIGHT = 2
CHECKPOINT_BYTES, CHECKPOINT_PART = 8 << 30, 8  # at most, and of what is left of host memory
MUCH = 2 << 30  # of a GPU's memory; less than that takes a desktop


class TensorTable(Protocol):
    """What planning needs of a Gguf."""

    @property
    def paths(self) -> Sequence[str]: ...

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class Draft:
    """What is decided before the context; places are what each tensor's memory is."""

    layout: Layout
    rules: Sequence[Rule]
    obeyed: Obeyed
    places: Places
    budget: Budget
    warnings: list[str]
    notes: list[str]


def draft_of(
    spec: Spec,
    gguf: TensorTable,
    machine: Machine,
    backend: Backend,
    options: Options,
    spread: Spread,
    warnings: Sequence[str],
) -> Draft:
    # A page is a run of each rank that shares out its positions.
    page = backend.page_tokens * spread.parts_of_page
    backend = msgspec.structs.replace(backend, page_tokens=page)
    steps = options.steps_in_flight or (1 if spread.mode == "layer" else STEPS_IN_FLIGHT)
    kept = _checkpoints(spec, gguf, machine, backend, options, spread)
    load = Load(options.slots or DEFAULT_SLOTS, options.batch_tokens, steps, kept)
    groups = _cache_groups(spec, backend, options)
    layout = layout_of(spec, gguf.tensors, machine, backend, options, spread, load, groups)
    rules, obeyed = _rules(layout)
    places = usual_places(layout.tensors, spec, machine, backend, options, spread.mode)
    if backend.in_vram:
        places = by_rules(places, rules, obeyed)
    notes: list[str] = []
    if backend.in_vram and options.fit:
        places = fit(places, obeyed.places, layout.budget, spec, machine, options, notes)
    found = [*spec.warnings, *warnings, *faults(rules, obeyed)]
    return Draft(layout, rules, obeyed, places, layout.budget(places), found, notes)


def _checkpoints(
    spec: Spec,
    gguf: TensorTable,
    machine: Machine,
    backend: Backend,
    options: Options,
    spread: Spread,
) -> int:
    """How many states of slots are kept in the host's memory, by all ranks together: a part of what
    the model leaves there, but some in any case. Raises PlanError."""
    if options.checkpoints < 0 or options.checkpoint_tokens < 1:
        raise OptionError(
            f"--ctx-checkpoints {options.checkpoints}, --checkpoint-every-n-tokens "
            f"{options.checkpoint_tokens}: expected 0 or more, and 1 or more"
        )
    one = sum(state_bytes(spec, share) for share in spread.shares)
    free, model = machine.available_bytes, sum(each.nbytes for each in gguf.tensors.values())
    vram = sum(machine.gpus[place].free_bytes for place in spread.places) if backend.in_vram else 0
    left = free - max(0, model - vram)
    room = min(CHECKPOINT_BYTES, max(left // CHECKPOINT_PART, free // 64))
    if options.checkpoint_bytes >= 0:
        room = options.checkpoint_bytes
    return min(options.checkpoints * (options.slots or DEFAULT_SLOTS), room // one) if one else 0


def _rules(layout: Layout) -> tuple[list[Rule], Obeyed]:
    """Rules and what they take. Where a CPU computes they are read and move nothing, so that one
    command line serves machines with GPUs and without."""
    options = layout.options
    if not layout.backend.in_vram:
        options = msgspec.structs.replace(options, cpu_moe=0, gpu_layers=-1)
    devices = {name: rank for rank, name in enumerate(_devices(layout))}
    rules = rules_of(options, layout.spec, devices, len(layout.spread.shares))
    return rules, obey(rules, layout.tensors, layout.spec)


def _check_size(draft: Draft) -> None:
    """Weights that are larger than all memory together. Raises ShortageError."""
    layout = draft.layout
    outside = ("pinned", "host", "mapped") if layout.backend.in_vram else ()
    tensors = sum(
        tensor.nbytes
        for name, tensor in layout.tensors.items()
        if draft.places.of[name].tier not in outside
    )
    owners = {memory_of(layout.machine, layout.backend, place) for place in layout.spread.places}
    total = sum(total for _, total, _ in owners)
    if tensors > total:
        is_one = len(owners) == 1
        owner = f"{next(iter(owners))[0]} has" if is_one else f"{len(owners)} GPUs have"
        raise ShortageError(
            f"the model's tensors take {show(tensors)}, but {owner} {show(total)} of memory in all"
        )


def finish(draft: Draft, gguf: TensorTable) -> Plan:
    """The Plan, with the context that fits; not sealed yet."""
    layout, options = draft.layout, draft.layout.options
    mode, load, warnings = layout.spread.mode, layout.load, list(draft.warnings)
    _check_size(draft)
    context, columns = choose_context(layout.spec, draft.budget, load.slots, options, warnings)
    warnings += [*_narrow(layout), *_taken(layout)]
    ranks = _ranks(draft, context, columns, warnings)
    shared = layout.shared(draft.places)
    warnings += _crowded(layout.machine, ranks, shared)
    return Plan(
        model=[os.path.abspath(path) for path in gguf.paths],
        alias=options.alias or _alias(gguf.paths[0]),
        architecture=layout.spec.architecture,
        backend=layout.backend.name,
        mode=mode,
        endpoint=options.endpoint,
        context=context,
        slots=load.slots,
        batch_tokens=options.batch_tokens,
        buckets=_buckets(layout),
        steps_in_flight=load.steps_in_flight,
        answer_rank=len(layout.spread.shares) - 1 if mode == "layer" else 0,
        ranks=ranks,
        caches=_caches(draft, columns),
        islands=_islands(layout),
        has_states=any(need.state for need in layout.needs(draft.places)),
        checkpoints=load.checkpoints,
        checkpoint_tokens=options.checkpoint_tokens if load.checkpoints else 0,
        tensors=_placements(gguf, draft),
        shared=shared,
        staged=layout.staged(draft.places),
        overrides=_overrides(draft),
        choices=_choices(layout),
        warnings=warnings,
        notes=_notes(draft),
    )


def _buckets(layout: Layout) -> list[int]:
    """Sizes of recorded steps, in rows."""
    backend = layout.backend
    most = min(layout.load.slots, backend.max_decode_rows) if backend.captures else 0
    return list(range(1, most + 1))


def _caches(draft: Draft, columns: int) -> list[CacheGroup]:
    counts = draft.layout.needs(draft.places)[0].pages(columns)
    both = zip(draft.layout.groups, counts, strict=True)
    return [msgspec.structs.replace(group, pages=count) for group, count in both]


def _choices(layout: Layout) -> dict[str, str]:
    kinds = layout.groups[0] if layout.groups else None
    return {
        "cache_type_k": kinds.key_type if kinds else "",
        "cache_type_v": kinds.value_type if kinds else "",
        "prefill_chunk": str(CHUNK),
        **chosen(layout.options),
        **layout.backend.choices,
    }


def _narrow(layout: Layout) -> list[str]:
    """A warning of steps that are too small."""
    batch, slots = layout.load.batch, layout.load.slots
    if batch >= CHUNK + slots:
        return []
    return [f"-b {batch} has no room for {slots} slots beside a chunk of {CHUNK}"]


def _islands(layout: Layout) -> list[int]:
    """--islands, checked. Raises PlanError."""
    given, ranks = layout.options.islands, len(layout.spread.shares)
    if given and (len(given) != ranks or min(given) < 0):
        shown = ",".join(map(str, given))
        raise OptionError(f"--islands {shown}: expected a number for each of {ranks} rank(s)")
    return list(given)


def _taken(layout: Layout) -> list[str]:
    """Warnings of GPUs in whose memory there is something already."""
    warnings = []
    if layout.backend.in_vram and not layout.options.vram_bytes:
        for gpu in (layout.machine.gpus[place] for place in layout.spread.places):
            if gpu.memory_bytes - gpu.free_bytes > MUCH:
                warnings.append(
                    f"GPU {gpu.index}: {show(gpu.memory_bytes - gpu.free_bytes)} of "
                    f"{show(gpu.memory_bytes)} are taken by something else; end it, or leave this "
                    "GPU out with --device"
                )
    return warnings


def _crowded(machine: Machine, ranks: list[RankPlan], shared: Mapping[str, int]) -> list[str]:
    """Warnings of CPU nodes whose ranks keep more than the node has; what is shared is spread."""
    warnings = []
    for node in machine.nodes if len(machine.nodes) > 1 else []:
        mine = sum(sum(rank.host.values()) for rank in ranks if rank.node == node.id)
        used = mine + sum(shared.values()) // len(machine.nodes)
        if mine and used > node.free_bytes:
            warnings.append(
                f"node {node.id} has {show(node.free_bytes)} free for {show(used)}: some of it "
                "will lie on another node and be read more slowly; take GPUs of several nodes"
            )
    return warnings


def _notes(draft: Draft) -> list[str]:
    """What was chosen, and why."""
    place = draft.places.of.get(TABLE)
    if place is None or not draft.layout.backend.in_vram:
        return draft.notes
    size = show(draft.layout.tensors[TABLE].nbytes)
    why = {
        "pinned": "pinned in host memory once for all ranks, since it fits there",
        "mapped": f"mapped: each rank reads rows of it from the file, {_why_mapped(draft)}",
    }.get(place.tier, f"in {place}, by rule")
    return [*draft.notes, f"the n-gram table ({size}): {why}"]


def _why_mapped(draft: Draft) -> str:
    machine, table = draft.layout.machine, draft.layout.tensors[TABLE]
    if TABLE in draft.obeyed.places:
        return "by rule"
    if 0 < machine.shared_bytes < table.nbytes + SHARED_ROOM:
        return f"since /dev/shm has room for {show(machine.shared_bytes)}"
    return "for lack of host memory"


def _ranks(draft: Draft, context: int, columns: int, warnings: list[str]) -> list[RankPlan]:
    layout, places = draft.layout, draft.places
    options, in_vram = layout.options, layout.backend.in_vram
    shares, needs = layout.spread.shares, layout.needs(places)
    hosts = layout.host_needs(places)
    gpus = layout.machine.gpus
    near = [gpus[place].node for place in layout.spread.places] if in_vram else []
    homes = divide_cpus(layout.machine, len(shares), options.threads, warnings, near)
    pages = -(-context // layout.backend.page_tokens)
    devices = _devices(layout)
    found = []
    for rank, (node, cpus) in enumerate(homes):
        host = hosts[rank].memory(columns, pages) if in_vram else {}
        both = zip(needs[rank].page, hosts[rank].page, strict=True)
        found.append(
            RankPlan(
                rank=rank,
                share=shares[rank],
                page_bytes=[here + there for here, there in both],
                device=devices[rank],
                node=node,
                cpus=cpus,
                threads=len(cpus),
                memory=needs[rank].memory(columns, pages),
                mapped_bytes=sum(layout.tensors[name].nbytes for name in layout.parts[rank]),
                host={name: nbytes for name, nbytes in host.items() if nbytes},
            )
        )
    return found


def _devices(layout: Layout) -> list[str]:
    if not layout.backend.in_vram:
        return ["cpu"] * len(layout.spread.places)
    return [f"cuda:{layout.machine.gpus[place].index}" for place in layout.spread.places]


def _cache_groups(spec: Spec, backend: Backend, options: Options) -> list[CacheGroup]:
    default = next(iter(backend.kv_types))  # the backend lists the one it likes best first
    key_type, value_type = options.cache_type_k or default, options.cache_type_v or default
    return [_cache_group(need, backend, key_type, value_type) for need in spec.caches]


def _cache_group(need: CacheNeed, backend: Backend, key_type: str, value_type: str) -> CacheGroup:
    head = row_bytes(backend, "-ctk", key_type, need.key_dim)
    head += row_bytes(backend, "-ctv", value_type, need.value_dim)
    # float32: one key for each block, and those of the last positions themselves
    index = 4 * need.index_dim * (backend.page_tokens // need.index_block + INDEX_RING)
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
        page_bytes=len(need.layers) * (backend.page_tokens * need.kv_heads * head + index),
        pages=0,
        index_bytes=index,
        index_dim=need.index_dim,
        index_block=need.index_block,
    )


def _placements(gguf: TensorTable, draft: Draft) -> dict[str, Placement]:
    placed = {}
    parts = draft.layout.parts
    for name, tensor in gguf.tensors.items():
        place = draft.places.of.get(name)
        kept = [rank for rank, mine in enumerate(parts) if name in mine]
        split = parts[kept[0]][name].split if kept else "none"
        if place is not None and place.rank >= 0:
            kept, split = [place.rank], "none"
        placed[name] = Placement(
            tier=place.tier if place else "mapped",
            ranks=kept,
            bytes=tensor.nbytes,
            type=tensor.type_name,
            split=split,
        )
    return placed


def _overrides(draft: Draft) -> list[Override]:
    tensors = draft.layout.tensors
    if not draft.layout.backend.in_vram:
        return []
    return [
        Override(
            rule=rule.text,
            place=str(rule.place),
            tensors=len(taken),
            bytes=sum(tensors[name].nbytes for name in taken),
        )
        for rule, taken in zip(draft.rules, draft.obeyed.taken, strict=True)
    ]


def _alias(path: str) -> str:
    return re.sub(r"(-00001-of-\d{5})?\.gguf$", "", Path(path).name)
