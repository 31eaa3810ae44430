"""How a model is spread: the mode, one Share for each rank, and the CPUs of each rank's process.

Pure arithmetic over Spec, Machine and Options. Nothing has to divide; ranks share CPUs where there
are fewer CPUs than ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
from voltapile.shm.formats import format_of
from voltapile.shm.gguf import Tensor
from voltapile.topology.affinity import choose_cpus
from voltapile.topology.machine import CpuNode, Machine
from voltapile.topology.plan import Backend, Options, PlanError
from voltapile.topology.share import Share, divide, layer_shares, tensor_shares, whole
from voltapile.topology.spec import Spec

MODES = ("none", "layer", "tensor", "experts")
MAX_RANKS = 64  # as many as a Board has places for
LEAST_UNIT = 32  # columns that stay together even where a format has smaller blocks


def with_devices(machine: Machine, backend: Backend, options: Options) -> Machine:
    """The Machine with the GPUs alone that --device names, in that order. Raises PlanError."""
    if not options.devices or not backend.in_vram:
        return machine
    known = {gpu.index: gpu for gpu in machine.gpus}
    for index in options.devices:
        if index not in known or options.devices.count(index) > 1:
            there = ", ".join(f"cuda:{each}" for each in known) or "no GPU"
            raise PlanError(f"--device cuda:{index}: expected each once of {there}")
    return msgspec.structs.replace(machine, gpus=[known[index] for index in options.devices])


def choose_mode(options: Options, ranks: int, warnings: list[str]) -> str:
    """The Plan's mode for so many ranks. Raises PlanError."""
    wanted = options.split_mode
    if wanted == "row":
        warnings.append("-sm row: taken as -sm tensor, which cuts rows of all matrices")
        wanted = "tensor"
    if wanted and wanted not in MODES:
        raise PlanError(f"-sm {wanted}: expected one of {', '.join(MODES)}")
    if wanted == "none" and ranks > 1:
        raise PlanError(f"-sm none computes on one rank, but --ranks is {ranks}")
    if ranks == 1:
        return "single"
    return wanted or "tensor"


def count_ranks(machine: Machine, backend: Backend, options: Options) -> int:
    """Worker processes: --ranks, else the entries of -ts, else one. Raises PlanError."""
    wanted = options.ranks
    if not 0 <= wanted <= MAX_RANKS:
        raise PlanError(f"--ranks {wanted}: expected 1 to {MAX_RANKS}, or 0 to choose")
    if options.split_mode == "none":
        return wanted or 1
    ranks = wanted or len(options.tensor_split) or 1
    if backend.in_vram and ranks > max(1, len(machine.gpus)):
        raise PlanError(
            f"--ranks {ranks}: this machine has {len(machine.gpus)} GPU(s); each rank takes one"
        )
    return ranks


def proportions(options: Options, ranks: int) -> list[float]:
    """-ts, checked; equal ones without it. Raises PlanError."""
    given = options.tensor_split
    if not given:
        return [1.0] * ranks
    shown = ",".join(f"{each:g}" for each in given)
    if any(not (math.isfinite(each) and each >= 0) for each in given):
        raise PlanError(f"-ts {shown}: expected numbers that are not negative")
    if not any(given):
        raise PlanError(f"-ts {shown}: all parts are 0; give at least one rank a part")
    if len(given) != ranks:
        raise PlanError(
            f"-ts {shown}: {len(given)} parts for {ranks} rank(s); give one number for each rank"
        )
    return list(given)


def shares(
    spec: Spec, tensors: Mapping[str, Tensor], mode: str, parts: Sequence[float]
) -> list[Share]:
    """One Share for each rank. Raises PlanError."""
    if mode == "single":
        return [whole(spec)]
    if mode == "layer":
        found = layer_shares(spec, parts)
        for rank, share in enumerate(found):
            if not share.layers:
                raise PlanError(
                    f"-sm layer: rank {rank} would have none of the {spec.layers} layers; use "
                    "fewer ranks or a more even -ts"
                )
        return found
    if mode == "experts":
        raise PlanError(
            f"-sm experts: a {spec.architecture} model has no experts; use -sm tensor or layer"
        )
    return tensor_shares(spec, parts, _ffn_unit(tensors))


def divide_cpus(
    machine: Machine, ranks: int, threads: int, warnings: list[str]
) -> list[tuple[int, list[int]]]:
    """A node and CPUs for each of several ranks; threads: of all ranks together, 0: every core.

    Neighbouring ranks share a node. A rank has one CPU at least; where ranks outnumber CPUs, they
    share them.
    """
    if ranks == 1:
        return [choose_cpus(machine, threads, warnings)]
    nodes = [node for node in machine.nodes if node.cpus]
    usable = sum(len(node.cpus) for node in nodes)
    total = threads or sum(node.cores for node in nodes)
    if machine.cpu_limit and not threads:
        total = min(total, max(1, int(machine.cpu_limit)))
    if total > usable:
        warnings.append(f"-t {threads}: this process may use {usable} CPUs")
        total = usable
    if 0 < threads < ranks:
        warnings.append(f"-t {threads}: each of {ranks} ranks has one thread at least")
    found: list[tuple[int, list[int]]] = []
    homes = divide(ranks, [float(node.cores) for node in nodes])
    counts = divide(total, [1.0] * ranks)
    for node, (first, last) in zip(nodes, homes, strict=True):
        wanted = [max(1, end - begin) for begin, end in counts[first:last]]
        found += [(node.id, cpus) for cpus in _deal(node, wanted)]
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


def _ffn_unit(tensors: Mapping[str, Tensor]) -> int:
    """Columns of ffn_down that stay together: whole blocks of every layer's format."""
    units = {
        format_of(tensor.type_name).block_len
        for name, tensor in tensors.items()
        if name.endswith(".ffn_down.weight")
    }
    return math.lcm(LEAST_UNIT, *units)
