"""The reference machines and models, and what is golden of the Plan for each pair.

    python tests/topology/reference.py          writes tests/data/plans anew; look at the difference

Models are tables of tensors in tests/data/headers: names with {} for the layer, type, shape, and
first, last and step of the layers (or a list of them). Nothing here probes this computer.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from voltapile.shm.formats import format_of, row_bytes
from voltapile.shm.gguf import Gguf, Tensor
from voltapile.shm.header import Header
from voltapile.topology import machine
from voltapile.topology.architectures import spec_of
from voltapile.topology.machine import Machine
from voltapile.topology.plan import Backend, Options, Plan, PlanError
from voltapile.topology.planner import plan

DATA = Path(__file__).parents[1] / "data"
MODELS = (
    "qwen3-8b-q4km", "qwen3-30b-a3b-q4km", "qwen3-235b-a22b-q3k", "qwen35-27b-q8", "flash-next-q4",
)  # fmt: skip
MACHINES = (
    "ac922-6xv100-16gb", "x86-4xv100-32gb", "x86-2xv100-16gb", "x86-2x2080ti", "x86-2xh200",
    "laptop",
)  # fmt: skip
FORMATS = ["F32", "F16", "Q8_0", "Q3_K", "Q4_K", "Q5_1", "Q6_K", "IQ4_NL"]
CPU = Backend(
    name="cpu",
    formats=FORMATS,
    kv_types={"f16": (1, 2), "q8_0": (16, 18)},
    page_tokens=64,
    max_decode_rows=64,
    activation_bytes=2.5,
    reserve_bytes=160 << 20,
    captures=True,
    group_bytes=1 << 20,
)
CUDA = msgspec.structs.replace(
    CPU,
    name="cuda",
    activation_bytes=4.0,
    reserve_bytes=1 << 30,
    in_vram=True,
    workspace_bytes=96 << 20,
    unpacked_bytes=2.0,
    host_reserve_bytes=1 << 30,
    group_bytes=4 << 20,
    staged_rows=8192,
    splits_positions=True,
)


@cache
def header(name: str) -> Gguf:
    """A model of tests/data/headers, without data and vocabulary."""
    found = json.loads((DATA / "headers" / f"{name}.json").read_text())
    metadata = {
        key: np.array(value) if isinstance(value, list) else value
        for key, value in found["metadata"].items()
    }
    tensors = []
    for pattern, type_name, shape, layers in found["tensors"]:
        if isinstance(layers, dict):
            numbers = layers["layers"]
        else:
            numbers = range(layers[0], layers[1] + 1, layers[2]) if layers else [-1]
        rows = int(np.prod(shape[:-1], dtype=np.int64))
        nbytes = rows * row_bytes(type_name, shape[-1])
        kind = format_of(type_name).id
        tensors += [
            Tensor(pattern.format(number), type_name, kind, tuple(shape), nbytes, 0, 0)
            for number in numbers
        ]
    return Gguf(f"{name}.gguf", [f"{name}.gguf"], [], [Header(3, metadata, tensors)])


@cache
def computer(name: str) -> Machine:
    return machine.load(DATA / "machines" / f"{name}.json")


def plan_for(where: str, model: str, **options: Any) -> Plan:
    """Raises PlanError."""
    gguf, there = header(model), computer(where)
    backend = CUDA if there.gpus else CPU
    return plan(spec_of(gguf), gguf, there, backend, Options(**options))


@cache
def usual(where: str, model: str) -> Plan:
    """Without any option. Raises PlanError."""
    return plan_for(where, model)


def golden(where: str, model: str) -> dict[str, Any]:
    """What a change of planning must not change unseen."""
    try:
        found = usual(where, model)
    except PlanError as error:
        return {"refused": str(error)}
    return {
        "mode": found.mode,
        "context": found.context,
        "slots": found.slots,
        "steps_in_flight": found.steps_in_flight,
        "pages": [group.pages for group in found.caches],
        "tiers": _tiers(found),
        "shared": found.shared,
        "notes": [note.partition(": ")[0] for note in found.notes],  # without predictions
        "warnings": found.warnings,
        "ranks": [_rank(found, rank) for rank in range(len(found.ranks))],
    }


def _tiers(found: Plan) -> dict[str, list[int]]:
    tiers: dict[str, list[int]] = {}
    for each in found.tensors.values():
        count, nbytes = tiers.get(each.tier, [0, 0])
        tiers[each.tier] = [count + 1, nbytes + each.bytes]
    return tiers


def _rank(found: Plan, number: int) -> dict[str, Any]:
    rank = found.ranks[number]
    share = {
        name: value
        for name, value in msgspec.to_builtins(rank.share).items()
        if name in ("heads", "kv_heads", "ffn", "experts", "shared_ffn", "vocab", "value_heads")
        if value and (name == "value_heads" or value[0] < value[1])
    }
    layers = f"{rank.share.layers[0]}-{rank.share.layers[-1]}"
    return {
        "device": rank.device, "node": rank.node, "threads": rank.threads, "layers": layers,
        **share, "page_bytes": rank.page_bytes, "memory": rank.memory, "host": rank.host,
    }  # fmt: skip


def text_of(plans: dict[str, dict[str, Any]]) -> str:
    """JSON with a line for each value and each rank, so that a difference can be read."""
    blocks = []
    for model, found in plans.items():
        lines = []
        for name, value in found.items():
            text = json.dumps(value)
            if name == "ranks":
                text = "[\n   " + ",\n   ".join(json.dumps(rank) for rank in value) + "\n  ]"
            lines.append(f'  "{name}": {text}')
        blocks.append(f' "{model}": {{\n' + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


if __name__ == "__main__":
    for where in MACHINES:
        path = DATA / "plans" / f"{where}.json"
        path.write_text(text_of({model: golden(where, model) for model in MODELS}))
