"""How a model can be spread: the mode, GPUs, one Share for each rank; and CPUs of each process.

Pure arithmetic over Spec, Machine and Options. Nothing has to divide; ranks share CPUs where there
are fewer CPUs than ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from voltapile.shm.formats import format_of
from voltapile.shm.gguf import Tensor
from voltapile.topology.affinity import choose_cpus
from voltapile.topology.machine import CpuNode, Machine, islands
from voltapile.topology.plan import Backend, OptionError, Options, PlanError
from voltapile.topology.share import Share, by_positions, divide, layer_shares, tensor_shares, whole
from voltapile.topology.spec import Spec

MODES = ("none", "layer", "tensor", "experts")
MAX_RANKS = 56  # as many as a Board has places for
LEAST_ARCH = 70  # that kernels are compiled for
LEAST_UNIT = 32  # columns that stay together even where a format has smaller blocks
TILE, MANY_TILES = 128, 8  # columns that kernels take at once; of which a rank should have some
EVEN_SHARE = 0.9  # of the largest GPU's free memory: with that, a smaller one gets as much


@dataclass(frozen=True)
class Spread:
    """One way of spreading a model over ranks."""

    mode: str
    places: list[int]  # of each rank, in the Machine's list of GPUs
    shares: list[Share]

    @property
    def parts_of_page(self) -> int:
        """So many ranks share out the positions of a page."""
        runs = self.shares[0].kv_runs
        return runs.parts if runs else 1


def seen(machine: Machine, backend: Backend, options: Options) -> Machine:
    """The Machine with the memory that the user says it has, and, for a backend of GPUs, with those
    GPUs alone that --device names, in that order. Raises PlanError."""
    gpus = machine.gpus
    if backend.in_vram and not options.devices:
        gpus = [gpu for gpu in gpus if gpu.arch >= LEAST_ARCH] or gpus
    if options.devices and backend.in_vram:
        known = {gpu.index: gpu for gpu in gpus}
        for index in options.devices:
            if index not in known:
                there = ", ".join(f"cuda:{each}" for each in known) or "none"
                raise OptionError(f"--device cuda:{index}: no such GPU; there is {there}")
            if options.devices.count(index) > 1:
                raise OptionError(f"--device cuda:{index}: named twice; a GPU takes one rank")
        gpus = [known[index] for index in options.devices]
    if backend.in_vram and (old := [gpu for gpu in gpus if gpu.arch < LEAST_ARCH]):
        raise PlanError(
            f"GPU {old[0].index} ({old[0].name}) has compute capability {old[0].arch / 10}, and "
            f"{LEAST_ARCH / 10} is the least: leave it out (--device), or use -ngl 0 for the CPU"
        )
    if options.vram_bytes and gpus:
        given = options.vram_bytes * (len(gpus) if len(options.vram_bytes) == 1 else 1)
        if len(given) != len(gpus):
            raise OptionError(
                f"--vram: {len(given)} sizes for {len(gpus)} GPUs; give one, or one for each"
            )
        gpus = [
            msgspec.structs.replace(gpu, free_bytes=size, memory_bytes=max(size, gpu.memory_bytes))
            for gpu, size in zip(gpus, given, strict=True)
        ]
    machine = msgspec.structs.replace(machine, gpus=gpus)
    if options.host_bytes:
        total = max(options.host_bytes, machine.memory_bytes)
        machine = msgspec.structs.replace(
            machine, available_bytes=options.host_bytes, memory_bytes=total
        )
    return machine


def spreads(
    spec: Spec,
    tensors: Mapping[str, Tensor],
    machine: Machine,
    backend: Backend,
    options: Options,
    warnings: list[str],
) -> list[Spread]:
    """The ways that the options leave open, most ranks first. Raises PlanError."""
    _check(machine, backend, options)
    wanted = options.split_mode
    if wanted == "row":
        warnings.append("-sm row: taken as -sm tensor, which cuts rows of all matrices")
        wanted = "tensor"
    if wanted == "experts" and spec.experts is None:
        raise OptionError(
            f"-sm experts: a {spec.architecture} model has no experts; use -sm tensor or layer"
        )
    usual = wanted or ("experts" if spec.experts else "tensor")
    found = []
    for places in _choices(machine, backend, options):
        parts = _proportions(machine, backend, options, places)
        places = [place for place, part in zip(places, parts, strict=True) if part]
        parts = [part for part in parts if part]  # a part of 0 is no rank
        mode = usual if len(places) > 1 else "single"
        shares = _shares(spec, tensors, mode, parts)
        if options.kv_split == "positions" and mode in ("tensor", "experts"):
            shares = _by_positions(spec, backend, shares)
        found.append(Spread(mode, places, shares))
    return found


def _by_positions(spec: Spec, backend: Backend, shares: Sequence[Share]) -> list[Share]:
    """Raises PlanError."""
    reason = ""
    if not backend.splits_positions:
        reason = f"the {backend.name} backend cannot do that yet"
    elif any(need.window or need.kind != "full" for need in spec.caches):
        reason = f"a {spec.architecture} model has layers that do not look at all positions"
    elif any(share.heads[0] == share.heads[1] for share in shares):
        reason = f"there are more ranks ({len(shares)}) than query heads that they could compute"
    if reason:
        raise OptionError(f"--kv-split positions: {reason}; use --kv-split heads")
    return by_positions(spec, shares, backend.page_tokens)


def _check(machine: Machine, backend: Backend, options: Options) -> None:
    ranks, mode = options.ranks, options.split_mode
    if not 0 <= ranks <= MAX_RANKS:
        raise OptionError(f"--ranks {ranks}: expected 1 to {MAX_RANKS}, or 0 to choose")
    if mode and mode not in (*MODES, "row"):
        raise OptionError(f"-sm {mode}: expected one of {', '.join(MODES)}")
    if options.kv_split not in ("", "heads", "positions"):
        raise OptionError(f"--kv-split {options.kv_split}: expected heads or positions")
    if mode == "none" and ranks > 1:
        raise OptionError(f"-sm none computes on one rank, but --ranks is {ranks}")
    if not backend.in_vram:
        return
    if not machine.gpus:
        raise OptionError(
            f"--backend {backend.name}: this machine has no GPU that the driver shows"
        )
    if ranks > len(machine.gpus):
        raise OptionError(
            f"--ranks {ranks}: this machine has {len(machine.gpus)} GPU(s); each rank takes one"
        )


def _choices(machine: Machine, backend: Backend, options: Options) -> list[list[int]]:
    """Sets of ranks that the options leave open, the largest first."""
    ranks, given = options.ranks, options.tensor_split
    if not backend.in_vram:
        return [list(range(1 if options.split_mode == "none" else ranks or len(given) or 1))]
    gpus = list(range(len(machine.gpus)))
    roomiest = max(gpus, key=lambda place: (machine.gpus[place].free_bytes >> 30, -place))
    if options.split_mode == "none" or (ranks == 1 and not given):
        return [[roomiest]]
    if ranks:
        return [_pick(islands(machine), ranks)]
    if given or options.split_mode or options.devices:
        return [gpus]
    island, found = islands(machine)[0], [gpus]
    if 1 < len(island) < len(gpus):
        found.append(island)
    if len(gpus) > 1:
        found.append([roomiest])
    return found


def _pick(groups: Sequence[Sequence[int]], count: int) -> list[int]:
    """So many GPUs: of one island if it has them, else as evenly from all as can be."""
    for group in groups:
        if len(group) >= count:
            return list(group[:count])
    left = [list(group) for group in groups]
    picked: list[int] = []
    while len(picked) < count:
        fullest = max(left, key=len)
        picked.append(fullest.pop(0))
    return sorted(picked)


def _proportions(
    machine: Machine, backend: Backend, options: Options, places: Sequence[int]
) -> list[float]:
    """-ts, checked; without it by free memory where GPUs differ in it, else equal."""
    given, ranks = options.tensor_split, len(places)
    if not given or ranks == 1 > len(given):
        free = [float(machine.gpus[place].free_bytes) for place in places] if machine.gpus else []
        differs = backend.in_vram and min(free) < EVEN_SHARE * max(free)
        return [size / 2**30 for size in free] if differs else [1.0] * ranks
    shown = ",".join(f"{each:g}" for each in given)
    if any(not (math.isfinite(each) and each >= 0) for each in given):
        raise OptionError(f"-ts {shown}: expected numbers that are not negative")
    if not any(given):
        raise OptionError(f"-ts {shown}: all parts are 0; give at least one rank a part")
    if len(given) != ranks:
        raise OptionError(
            f"-ts {shown}: {len(given)} parts for {ranks} rank(s); give one number for each rank"
        )
    return list(given)


def _shares(
    spec: Spec, tensors: Mapping[str, Tensor], mode: str, parts: Sequence[float]
) -> list[Share]:
    """One Share for each rank. Raises PlanError."""
    if mode == "single":
        return [whole(spec)]
    if mode == "layer":
        found = layer_shares(spec, parts)
        for rank, share in enumerate(found):
            if not share.layers:
                raise OptionError(
                    f"-sm layer: rank {rank} would have none of the {spec.layers} layers; use "
                    "fewer ranks or a more even -ts"
                )
        return found
    experts = _unit(tensors, "ffn_down_exps", len(parts)) if mode == "tensor" else 0
    dense, shared = (_unit(tensors, stem, len(parts)) for stem in ("ffn_down", "ffn_down_shexp"))
    return tensor_shares(spec, parts, dense, experts, shared, _delta_unit(spec, tensors))


def _delta_unit(spec: Spec, tensors: Mapping[str, Tensor]) -> int:
    """Value heads that fill whole blocks of ssm_out's columns, in every layer's format; and where
    those of a key head lie together in a tensor, all of these."""
    delta = spec.delta
    if delta is None:
        return 1
    together = 1 if delta.is_tiled else delta.value_heads // delta.key_heads
    found = [tensor for name, tensor in tensors.items() if name.split(".")[2:3] == ["ssm_out"]]
    blocks = (format_of(each.type_name).block_len for each in found)
    return math.lcm(together, math.lcm(delta.head_dim, *blocks) // delta.head_dim)


def divide_cpus(
    machine: Machine, ranks: int, threads: int, warnings: list[str], homes: Sequence[int] = ()
) -> list[tuple[int, list[int]]]:
    """A node and CPUs for each rank. threads: of all ranks together, 0: every core; homes: the
    node of each rank's GPU.

    Without homes neighbouring ranks share a node. A rank has one CPU at least; where ranks
    outnumber CPUs, they share them.
    """
    nodes = {node.id: node for node in machine.nodes if node.cpus}
    if len(homes) != ranks or not set(homes) <= set(nodes):
        if ranks == 1:
            return [choose_cpus(machine, threads, warnings)]
        cores = [float(node.cores) for node in nodes.values()]
        parts = zip(nodes, divide(ranks, cores), strict=True)
        homes = [node for node, (first, last) in parts for _ in range(first, last)]
    counts = _threads(machine, homes, threads, warnings)
    found: dict[int, tuple[int, list[int]]] = {}
    for node in nodes.values():
        mine = [rank for rank, home in enumerate(homes) if home == node.id]
        dealt = _deal(node, [counts[rank] for rank in mine])
        found |= {rank: (node.id, cpus) for rank, cpus in zip(mine, dealt, strict=True)}
    return [found[rank] for rank in range(ranks)]


def _threads(
    machine: Machine, homes: Sequence[int], threads: int, warnings: list[str]
) -> list[int]:
    """Of each rank: an even part of all threads, or of its node's cores."""
    ranks = len(homes)
    usable = sum(len(node.cpus) for node in machine.nodes)
    cores = {node.id: node.cores for node in machine.nodes}
    limit = max(1, int(machine.cpu_limit)) if machine.cpu_limit else usable
    if threads > usable:
        warnings.append(f"-t {threads}: this process may use {usable} CPUs")
    if 0 < threads < ranks:
        warnings.append(f"-t {threads}: each of {ranks} ranks has one thread at least")
    total = min(threads, usable) or min(limit, sum(cores[home] for home in set(homes)))
    if threads or total == limit < usable:
        return [max(1, end - begin) for begin, end in divide(total, [1.0] * ranks)]
    found = []
    for rank, home in enumerate(homes):
        before, all_here = homes[:rank].count(home), homes.count(home)
        begin, end = divide(cores[home], [1.0] * all_here)[before]
        found.append(max(1, end - begin))
    return found


def _deal(node: CpuNode, wanted: Sequence[int]) -> list[list[int]]:
    """CPUs of one node for its ranks, cores first; from the beginning again when all are dealt."""
    dealt, start = [], 0
    for count in wanted:
        count = min(count, len(node.cpus))
        begin = start if start + count <= len(node.cpus) else 0
        dealt.append(node.cpus[begin : begin + count])
        start = begin + count
    return dealt


def _unit(tensors: Mapping[str, Tensor], stem: str, ranks: int) -> int:
    """Columns of a matrix that stay together: whole blocks of every layer's format; tiles of 128
    where each rank gets many."""
    found = [tensor for name, tensor in tensors.items() if name.split(".")[2:3] == [stem]]
    least = math.lcm(LEAST_UNIT, *(format_of(each.type_name).block_len for each in found))
    tile = math.lcm(TILE, least)
    width = min((each.shape[-1] for each in found), default=0)
    return tile if width >= MANY_TILES * ranks * tile else least
