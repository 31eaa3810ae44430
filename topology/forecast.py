"""How fast a Plan would be: seconds of a token and of a prompt, by bytes, arithmetic and links.

Adds up, for each rank, what roofline.py says of its part, what comes from host memory or the drive,
and the sums over ranks. Only what roofline.py was fitted to (dense models, one H200) is more than
arithmetic; whoever prints a forecast says which it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from math import factorial

from voltapile.shm.formats import format_of
from voltapile.shm.gguf import Tensor
from voltapile.topology import roofline
from voltapile.topology.links import reduce_seconds, send_seconds
from voltapile.topology.machine import Machine
from voltapile.topology.overrides import role_of
from voltapile.topology.parts import part_of
from voltapile.topology.placement import CPU_SHARE, EMBEDDING, TABLE
from voltapile.topology.plan import Plan, RankPlan
from voltapile.topology.roofline import OURS, Card, Work
from voltapile.topology.scratch import state_bytes
from voltapile.topology.spec import Spec

PROMPT = 2048  # tokens, of the prompt that is told of


@dataclass(frozen=True)
class Forecast:
    """Tokens a second. bound_by: where most of a token's time goes."""

    decode: float  # of one stream with a short context
    decode_deep: float  # with `deep` tokens before it
    deep: int
    prefill: float  # of a prompt of PROMPT tokens; 0: unknown
    bound_by: str
    is_measured: bool  # the card and the kind of model are those that roofline.py was fitted to


@dataclass
class _Reads:
    """Of one rank and token: bytes of weights by tier, and values multiplied with."""

    bytes: dict[str, float] = field(default_factory=dict)
    values: float = 0.0
    all_values: float = 0.0  # of a prompt's chunk, every expert
    all_bytes: dict[str, float] = field(default_factory=dict)

    def add(self, tier: str, nbytes: float, per_value: float, used: float, alike: float) -> None:
        """used: share of it that a token reads here; alike: that a token computes with."""
        self.bytes[tier] = self.bytes.get(tier, 0.0) + used * nbytes
        self.all_bytes[tier] = self.all_bytes.get(tier, 0.0) + nbytes
        self.values += used * nbytes / per_value
        self.all_values += alike * nbytes / per_value


def forecast(
    spec: Spec, tensors: Mapping[str, Tensor], plan: Plan, machine: Machine
) -> Forecast | None:
    """None where the machine does not tell enough."""
    reads = [_reads(spec, tensors, plan, rank) for rank in plan.ranks]
    deep = max(1, min(plan.context - 1, 32768))
    near = _token_seconds(spec, plan, machine, reads, 1)
    far = _token_seconds(spec, plan, machine, reads, deep)
    if near is None or far is None:
        return None
    prompt = _prompt_seconds(spec, plan, machine, reads)
    cards = _cards(plan, machine)
    is_known = len(plan.ranks) == 1 and not (spec.experts or spec.delta)
    return Forecast(
        decode=1 / sum(near.values()),
        decode_deep=1 / sum(far.values()),
        deep=deep,
        prefill=PROMPT / prompt if prompt else 0.0,
        bound_by=max(near, key=lambda part: near[part]),
        is_measured=is_known and all(card and card.is_measured for card in cards),
    )


def rate(speed: float) -> str:
    """Tokens a second, for people."""
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


@cache
def busiest(used: int, ranks: int) -> float:
    """Expected number of a token's experts on the rank that has most of them.

    Experts fall on ranks as balls into boxes: P(no box has more than m) is the coefficient of
    x^used in used! (sum of x^i / i! for i <= m)^ranks / ranks^used."""
    expected = 0.0
    for most in range(used):
        box = [1 / factorial(i) for i in range(min(most, used) + 1)]
        ways = [1.0]
        for _ in range(ranks):
            ways = [
                sum(ways[i - j] * box[j] for j in range(len(box)) if 0 <= i - j < len(ways))
                for i in range(min(used + 1, len(ways) + len(box) - 1))
            ]
        within = ways[used] * factorial(used) / ranks**used if len(ways) > used else 0.0
        expected += 1 - within
    return expected


def _reads(spec: Spec, tensors: Mapping[str, Tensor], plan: Plan, rank: RankPlan) -> _Reads:
    found = _Reads()
    experts, ranks = spec.experts, len(plan.ranks)
    for name, place in plan.tensors.items():
        if rank.rank not in place.ranks or name == TABLE or (name == EMBEDDING and not spec.tied):
            continue
        tensor = tensors[name]
        nbytes = float(part_of(tensor, spec, rank.share).bytes)
        used = alike = 1.0
        if experts and role_of(name, spec) == "experts":
            alike = experts.used / experts.count
            load = float(experts.used)
            if plan.mode == "experts":  # ranks wait for the busiest, but share a CPU's memory
                is_own = place.tier in ("vram", "pinned")
                load = busiest(experts.used, ranks) if is_own else load / ranks
            mine = rank.share.experts[1] - rank.share.experts[0]
            used = min(1.0, load / max(1, mine))
        found.add(place.tier, nbytes, _bytes_a_value(tensor), used, alike)
    return found


def _bytes_a_value(tensor: Tensor) -> float:
    kind = format_of(tensor.type_name)
    return kind.block_bytes / kind.block_len


def _token_seconds(
    spec: Spec, plan: Plan, machine: Machine, reads: list[_Reads], context: int
) -> dict[str, float] | None:
    """Of one token, by what it waits for."""
    slowest: list[dict[str, float]] = []
    for rank, mine, card in zip(plan.ranks, reads, _cards(plan, machine), strict=True):
        outside = _outside_seconds(plan, machine, rank, mine.bytes)
        here = _rank_seconds(spec, plan, machine, rank, mine, card, context)
        if outside is None or here is None:
            return None
        slowest.append({"VRAM" if card else "memory": here, **outside})
    reduced = 4.0 * spec.width * spec.streams
    if plan.mode == "layer":
        total: dict[str, float] = {}
        for each in slowest:
            for part, seconds in each.items():
                total[part] = total.get(part, 0.0) + seconds
        pairs = pairwise(_places(plan, machine))
        total["communication"] = sum(send_seconds(machine, a, b, reduced) for a, b in pairs)
        return total
    found = max(slowest, key=lambda each: sum(each.values()))
    if len(plan.ranks) > 1:
        found["communication"] = _meeting_seconds(spec, plan, machine, 1)
    return found


def _meeting_seconds(spec: Spec, plan: Plan, machine: Machine, tokens: int) -> float:
    """Of a step of ranks that have parts of each layer: two sums a layer, and what ranks that share
    out positions tell each other of all heads: queries, weights, answers."""
    places, runs = _places(plan, machine), plan.ranks[0].share.kv_runs
    sizes = {float(spec.width): 2 * spec.layers}
    if runs:
        attending = sum(len(group.layers) for group in plan.caches)
        told = spec.heads * spec.key_dim / runs.parts, spec.heads, spec.heads * spec.value_dim
        for size in told:
            sizes[size] = sizes.get(size, 0) + attending
    return sum(
        count * reduce_seconds(machine, places, 4.0 * size * tokens)
        for size, count in sizes.items()
    )


def _rank_seconds(
    spec: Spec,
    plan: Plan,
    machine: Machine,
    rank: RankPlan,
    reads: _Reads,
    card: Card | None,
    context: int,
) -> float | None:
    """What a GPU does with what is in VRAM; what a CPU does with its caches."""
    cache = _cache_bytes(spec, plan, rank, context)
    if card is None:
        rate = _cpu_rate(plan, machine, rank) if rank.device == "cpu" else 0.0
        return cache / rate if rate else None
    work = Work(
        tokens=1,
        weights=reads.bytes.get("vram", 0.0),
        cache=cache,
        few=2.0 * reads.values,
        attention=_attention_flops(spec, plan, rank, context),
        launches=roofline.LAYER_LAUNCHES * len(rank.share.layers) + roofline.STEP_LAUNCHES,
    )
    return roofline.seconds(work, card, OURS)


def _outside_seconds(
    plan: Plan, machine: Machine, rank: RankPlan, reads: Mapping[str, float]
) -> dict[str, float] | None:
    """Of weights that are not in VRAM."""
    rate_of_cpu = _cpu_rate(plan, machine, rank)
    found: dict[str, float] = {}
    if pinned := reads.get("pinned", 0.0):
        gpu = machine.gpus[_places(plan, machine)[rank.rank]]
        rate = min(gpu.host_bandwidth, rate_of_cpu / CPU_SHARE or gpu.host_bandwidth)
        if not rate:
            return None
        found["host memory"] = pinned / rate
    computed = reads.get("host", 0.0)
    if mapped := reads.get("mapped", 0.0):
        missing = mapped * _uncached(plan, machine)
        computed += mapped - missing
        if missing:
            if not machine.disk_bandwidth:
                return None
            found["the drive"] = missing * len(plan.ranks) / machine.disk_bandwidth
    if computed:
        if not rate_of_cpu:
            return None
        found["host memory"] = found.get("host memory", 0.0) + computed / rate_of_cpu
    return found


def _cpu_rate(plan: Plan, machine: Machine, rank: RankPlan) -> float:
    """Bytes of weights a second that a rank's CPUs compute with; ranks of a node share its memory.
    0: unknown."""
    near = sum(each.node == rank.node for each in plan.ranks)
    node = next((each for each in machine.nodes if each.id == rank.node), machine.nodes[0])
    return CPU_SHARE * node.bandwidth / near


def _uncached(plan: Plan, machine: Machine) -> float:
    """Share of the mapped weights that host memory has no room for."""
    mapped = sum(
        t.bytes for name, t in plan.tensors.items() if t.tier == "mapped" and name != TABLE
    )
    used = sum(plan.shared.values()) + sum(sum(rank.host.values()) for rank in plan.ranks)
    if plan.ranks[0].device == "cpu":
        used += sum(sum(rank.memory.values()) for rank in plan.ranks)
    room = max(0, machine.available_bytes - used)
    return max(0.0, 1 - room / mapped) if mapped else 0.0


def _prompt_seconds(spec: Spec, plan: Plan, machine: Machine, reads: list[_Reads]) -> float | None:
    """Of a prompt of PROMPT tokens; None: unknown."""
    chunks = -(-PROMPT // plan.batch_tokens)
    seconds = []
    for rank, mine, card in zip(plan.ranks, reads, _cards(plan, machine), strict=True):
        if card is None:
            return None
        unpacked = 0.0 if spec.experts else 4.0 * mine.values
        work = Work(
            tokens=PROMPT,
            weights=chunks * (mine.all_bytes.get("vram", 0.0) + unpacked),
            many=2.0 * mine.all_values * PROMPT,
            attention=_attention_flops(spec, plan, rank, PROMPT // 2) * PROMPT,
            launches=chunks * roofline.MANY_LAYER_LAUNCHES * len(rank.share.layers),
        )
        outside = sum(n for tier, n in mine.all_bytes.items() if tier != "vram")
        gpu = machine.gpus[_places(plan, machine)[rank.rank]]
        if outside and not gpu.host_bandwidth:
            return None
        streamed = chunks * outside / gpu.host_bandwidth if outside else 0.0
        seconds.append(roofline.seconds(work, card, OURS) + streamed)
    if plan.mode == "layer":
        return sum(seconds)
    tokens = min(PROMPT, plan.batch_tokens)
    return max(seconds) + chunks * _meeting_seconds(spec, plan, machine, tokens)


def _cache_bytes(spec: Spec, plan: Plan, rank: RankPlan, context: int) -> float:
    """Read for one token: keys and values that it sees, states of delta nets twice."""
    total = 2.0 * state_bytes(spec, rank.share)
    for group, page in zip(plan.caches, rank.page_bytes, strict=True):
        layers = len(set(group.layers) & set(rank.share.layers))
        index = layers * group.index_bytes
        seen = min(context, group.window) if group.window else context
        if group.index_bytes and spec.indexer:
            seen = min(context, spec.indexer.top_k)
        total += ((page - index) * seen + index * context) / group.page_tokens
    return total


def _attention_flops(spec: Spec, plan: Plan, rank: RankPlan, context: int) -> float:
    heads = rank.share.heads[1] - rank.share.heads[0]
    total = 0.0
    for group in plan.caches:
        layers = len(set(group.layers) & set(rank.share.layers))
        seen = min(context, group.window) if group.window else context
        if group.index_bytes and spec.indexer:
            blocks = context / spec.indexer.block
            total += 2.0 * layers * spec.indexer.heads * spec.indexer.key_dim * blocks
            seen = min(context, spec.indexer.top_k)
        total += 2.0 * layers * heads * (group.key_dim + group.value_dim) * seen
    return total


def _cards(plan: Plan, machine: Machine) -> list[Card | None]:
    """Of each rank; on a CPU, the memory of its node."""
    if plan.ranks[0].device != "cpu":
        return [roofline.card_of(machine.gpus[place]) for place in _places(plan, machine)]
    return [None for _ in plan.ranks]


def _places(plan: Plan, machine: Machine) -> list[int]:
    """Of each rank's GPU in the Machine's list."""
    indexes = [gpu.index for gpu in machine.gpus]
    found = [rank.device.partition(":")[2] for rank in plan.ranks]
    return [indexes.index(int(index)) for index in found if index]
