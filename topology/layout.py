"""Layout: a model spread over ranks, and what each memory holds of it once tensors have places.

Made once for each way of spreading a model; asked for a budget as often as places change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from voltapile.shm.gguf import Tensor
from voltapile.topology.budget import Budget, Pool
from voltapile.topology.machine import Machine
from voltapile.topology.memory import (
    Load,
    Sizes,
    copied_bytes,
    host_sizes,
    memory_of,
    resident_bytes,
    sizes,
)
from voltapile.topology.parts import Part, part_of
from voltapile.topology.placement import SHARED, TABLE, Places
from voltapile.topology.plan import Backend, CacheGroup, Options
from voltapile.topology.ranks import Spread
from voltapile.topology.spec import Spec

ROW_NUMBER = 8  # bytes


@dataclass(frozen=True)
class Layout:
    """What is decided before places."""

    spec: Spec
    tensors: Mapping[str, Tensor]  # that are used
    machine: Machine
    backend: Backend
    options: Options
    spread: Spread
    load: Load
    groups: Sequence[CacheGroup]
    parts: Sequence[Mapping[str, Part]]  # of each rank: of tensors that it keeps something of

    def needs(self, places: Places) -> list[Sizes]:
        """Of each rank, in the memory that it computes in."""
        ranks = len(self.spread.shares)
        return [
            sizes(
                self.spec,
                self.backend,
                self.groups,
                share,
                ranks,
                self.load,
                self._weights(rank, places),
                places.host_layers,
            )
            for rank, share in enumerate(self.spread.shares)
        ]

    def host_needs(self, places: Places) -> list[Sizes]:
        """Of each rank, beside its VRAM."""
        return [
            host_sizes(
                self.spec,
                self.backend,
                self.groups,
                share,
                self.load,
                self.kept(rank, places, "pinned") + self.kept(rank, places, "host"),
                places.host_layers,
                sum(n for name, n in self.staged(places).items() if name in self.parts[rank]),
            )
            for rank, share in enumerate(self.spread.shares)
        ]

    def kept(self, rank: int, places: Places, tier: str) -> int:
        """Bytes of tensors in a tier that this rank alone keeps."""
        return sum(
            part.bytes
            for name, part in self.parts[rank].items()
            if places.of[name].tier == tier and name not in SHARED
        )

    def shared(self, places: Places) -> dict[str, int]:
        """Bytes of host memory that all ranks read, by tensor."""
        if not self.backend.in_vram:
            return {}
        return {
            name: self.tensors[name].nbytes
            for name in SHARED
            if name in self.tensors and places.of[name].tier in ("pinned", "host")
        }

    def staged(self, places: Places) -> dict[str, int]:
        """Page-locked bytes of each rank where rows of the n-gram table arrive, if it stays in the
        file: their numbers, and the rows."""
        table = self.tensors.get(TABLE)
        rows = self.backend.staged_rows
        if table is None or not rows or places.of[TABLE].tier != "mapped":
            return {}
        return {TABLE: rows * (ROW_NUMBER + table.nbytes // table.shape[0])}

    def mapped(self, places: Places) -> int:
        """Bytes of the file that are read while it is mapped."""
        return sum(
            tensor.nbytes
            for name, tensor in self.tensors.items()
            if places.of[name].tier == "mapped"
        )

    def budget(self, places: Places) -> Budget:
        """All memories: one for all ranks; or a GPU's for each and the host's."""
        needs, margin = self.needs(places), self.options.margin_bytes
        page = self.backend.page_tokens
        if not self.backend.in_vram:
            owner, total, free = memory_of(self.machine, self.backend)
            pool = Pool(owner, total, free - margin, tuple(needs), self.mapped(places))
            return Budget([pool], margin, page)
        pools = []
        for place, need in zip(self.spread.places, needs, strict=True):
            owner, total, free = memory_of(self.machine, self.backend, place)
            pools.append(Pool(owner, total, free - margin, (need,), is_vram=True))
        host = self.machine.available_bytes - margin
        host -= sum(self.shared(places).values())
        beside = tuple(self.host_needs(places))
        pools.append(Pool("the host", self.machine.memory_bytes, host, beside))
        return Budget(pools, margin, page)

    def _weights(self, rank: int, places: Places) -> int:
        """What a rank allocates for weights: what lies in VRAM; or a copy of everything, or of
        what it cuts out of the mapped file."""
        parts = self.parts[rank]
        if not self.backend.in_vram:
            copies_all = self.options.no_mmap
            copied = [p.bytes for p in parts.values() if copies_all or p.is_copied]
            return copied_bytes(copied) if copied else 0
        resident = []
        for name, place in places.of.items():
            if place.tier != "vram":
                continue
            if place.rank < 0 and name in parts:
                resident.append(self._loaded(name, parts[name].bytes))
            elif place.rank == rank:
                resident.append(self._loaded(name, self.tensors[name].nbytes))
        return resident_bytes(resident)

    def _loaded(self, name: str, nbytes: int) -> int:
        """What so many bytes of a tensor's file take in VRAM."""
        before, after = self.backend.repacked.get(self.tensors[name].type_name, (1, 1))
        return nbytes // before * after


def layout_of(
    spec: Spec,
    tensors: Mapping[str, Tensor],
    machine: Machine,
    backend: Backend,
    options: Options,
    spread: Spread,
    load: Load,
    groups: Sequence[CacheGroup],
) -> Layout:
    """tensors: all of the file's; those that no rank needs are not used."""
    parts: list[dict[str, Part]] = []
    for share in spread.shares:
        found = {name: part_of(tensor, spec, share) for name, tensor in tensors.items()}
        parts.append({name: part for name, part in found.items() if part.bytes})
    used = {name: each for name, each in tensors.items() if any(name in kept for kept in parts)}
    return Layout(spec, used, machine, backend, options, spread, load, groups, parts)
