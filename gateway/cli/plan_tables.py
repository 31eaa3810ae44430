"""The tables of voltapile plan: what was decided, memory by device, tensors by role, rules."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from voltapile.topology.machine import Machine
    from voltapile.topology.plan import Plan, RankPlan
    from voltapile.topology.spec import Spec

PURPOSES = {
    "weights": "weights",
    "kv": "KV",
    "state": "state",
    "scratch": "scratch",
    "slots": "slots",
    "checkpoints": "checkpoints",  # copies of states
    "communication": "ranks",  # what they write to each other
    "staging": "staging",  # where rows of a table in the file arrive
    "draft": "draft",
    "shared": "shared",
    "reserve": "reserve",  # a GPU's: the driver's context, kernels, graphs
}
MODES = {
    "single": "one rank",
    "layer": "ranks hold whole layers, one behind another",
    "tensor": "each rank holds a part of every matrix",
    "experts": "each rank holds some experts, and a part of every other matrix",
}


def settings(plan: Plan, machine: Machine, largest: int, trained: int) -> RenderableType:
    """What the Plan decided. largest, trained: contexts."""
    rank, count = plan.ranks[0], len(plan.ranks)
    alone = f"{rank.threads} thread(s) on node {rank.node}"
    spread = alone if count == 1 else f"{count} ranks, mode {plan.mode}: {MODES[plan.mode]}"
    ahead = (
        "steps of" if plan.steps_in_flight == 1 else f"{plan.steps_in_flight} steps in flight of"
    )
    rows = {
        "model": f"{plan.alias} ({plan.architecture}, {len(plan.model)} file(s))",
        "plan": plan.id,
        "machine": f"{machine.name}: {machine.cpu}, {len(machine.nodes)} node(s)",
        "backend": f"{plan.backend}, {spread}",
        "context": f"{plan.context} tokens for one request; {_reach(largest, trained)}",
        "slots": f"{plan.slots} requests at once, {ahead} up to {plan.batch_tokens} tokens",
        "endpoint": plan.endpoint,
    }
    for cache in plan.caches:
        kind = f"window of {cache.window}" if cache.window else cache.kind
        rows[f"cache ({len(cache.layers)} layers, {kind})"] = (
            f"{cache.pages - 1} pages of {cache.page_tokens} tokens for all requests; "
            f"keys {cache.key_type}, values {cache.value_type}, "
            f"{cache.page_bytes // cache.page_tokens} bytes a token"
        )
    table = Table(show_header=False, box=None)
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _reach(largest: int, trained: int) -> str:
    """How far a context could go: memory may hold more than the model can use."""
    if largest <= trained:
        return f"the largest that fits: {largest}"
    return f"trained: {trained}; memory holds {largest} (--rope-scaling yarn)"


def ranks(plan: Plan) -> RenderableType:
    """Where each rank runs and what it computes."""
    table = Table("rank", "device", "node", "CPUs", "computes")
    for rank in plan.ranks:
        where = str(rank.rank), rank.device, str(rank.node)
        table.add_row(*where, cpu_list(rank.cpus), share_text(rank))
    return table


def memory(plan: Plan, machine: Machine, margin: int) -> RenderableType:
    """Bytes by purpose: a row for each rank's memory, and one for the host's beside them."""
    in_vram = plan.ranks[0].device != "cpu"
    rows = {rank.device if in_vram else f"rank {rank.rank}": rank.memory for rank in plan.ranks}
    if in_vram:
        rows["host"] = host_memory(plan)
    purposes = {
        name: title for name, title in PURPOSES.items() if any(name in r for r in rows.values())
    }
    table = Table("MiB", *purposes.values(), "together", "available", "left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in rows.items():
        used = sum(row.values())
        free = gpu_free(machine, name) if in_vram and name != "host" else machine.available_bytes
        end = [mib(free), mib(free - used - margin)] if in_vram else ["", ""]
        table.add_row(name, *(mib(row.get(each, 0)) for each in purposes), mib(used), *end)
    if not in_vram:
        all_ranks = total(list(rows.values()))
        used, free = sum(all_ranks.values()), machine.available_bytes
        each = (mib(all_ranks.get(name, 0)) for name in purposes)
        table.add_section()
        table.add_row("machine", *each, mib(used), mib(free), mib(free - used - margin))
    return table


def beside(plan: Plan, margin: int) -> list[str]:
    """What the table of memory does not show."""
    lines = [
        f"margin: {mib(margin)} MiB of each memory stay free (--margin); steps in flight: "
        f"{plan.steps_in_flight}"
    ]
    if plan.shared:
        named = ", ".join(f"{name} {mib(nbytes)} MiB" for name, nbytes in plan.shared.items())
        lines.append(f"shared by all ranks: {named}")
    if plan.ranks[0].device != "cpu":
        lines.append(
            "reserve: the driver's context, kernels, recorded steps; of the host: processes"
        )
    if nbytes := mapped(plan):
        lines.append(f"mapped file: {mib(nbytes)} MiB, as far as the page cache holds them")
    return lines


def tensors(plan: Plan, spec: Spec) -> RenderableType:
    """Tensors by role, tier and how they are divided."""
    from voltapile.topology.overrides import role_of

    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    types: dict[tuple[str, str, str], Counter[str]] = {}
    for name, placement in plan.tensors.items():
        split = placement.split if placement.ranks else "not used"
        if len(placement.ranks) < len(plan.ranks) and placement.ranks:
            split = f"{split}, on some ranks"
        key = role_of(name, spec), placement.tier, split
        counts[key] += 1
        sizes[key] += placement.bytes
        types.setdefault(key, Counter())[placement.type] += placement.bytes
    table = Table("tensors", "place", "divided by", "count", "MiB", "types")
    for column in table.columns[3:5]:
        column.justify = "right"
    for key, nbytes in sizes.most_common():
        named = ", ".join(name for name, _ in types[key].most_common())
        table.add_row(*key, str(counts[key]), mib(nbytes), named)
    return table


def overrides(plan: Plan) -> RenderableType:
    """What each rule took."""
    table = Table("rule", "place", "tensors", "MiB")
    for column in table.columns[2:]:
        column.justify = "right"
    for each in plan.overrides:
        table.add_row(each.rule, each.place, str(each.tensors), mib(each.bytes))
    return table


def share_text(rank: RankPlan) -> str:
    """What a rank computes, for people."""
    share = rank.share
    parts = [f"layers {span((share.layers[0], share.layers[-1] + 1))}"]
    if share.is_part:
        named = {
            "heads": share.heads, "KV heads": share.kv_heads, "ffn": share.ffn,
            "experts": share.experts, "rows of the head": share.vocab,
        }  # fmt: skip
        parts += [f"{name} {span(part)}" for name, part in named.items() if part[0] < part[1]]
        if share.value_heads:
            parts.append(f"{len(share.value_heads)} delta-net heads")
    return ", ".join(parts)


def span(part: tuple[int, int]) -> str:
    first, last = part[0], part[1] - 1
    return f"{first}" if first == last else f"{first}-{last}"


def host_memory(plan: Plan) -> dict[str, int]:
    """Of all ranks beside VRAM, and what they share."""
    shared = sum(plan.shared.values())
    return total([*(rank.host for rank in plan.ranks), {"shared": shared} if shared else {}])


def total(columns: list[dict[str, int]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for column in columns:
        found.update(column)
    return dict(found)


def mapped(plan: Plan) -> int:
    return sum(each.bytes for each in plan.tensors.values() if each.tier == "mapped" and each.ranks)


def gpu_free(machine: Machine, device: str) -> int:
    return next(gpu.free_bytes for gpu in machine.gpus if f"cuda:{gpu.index}" == device)


def cpu_list(cpus: list[int]) -> str:
    """CPUs as the kernel writes them: 0-3,8."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def mib(nbytes: int) -> str:
    size = nbytes / 2**20
    return f"{size:,.1f}" if abs(size) < 100 else f"{size:,.0f}"
