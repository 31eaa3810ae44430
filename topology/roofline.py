"""Roofline: the bytes, arithmetic and launches of a step, and the time that a GPU takes for them.

Pure arithmetic over Spec, Plan and Gpu, for dense models on the cuda backend. What share of a
card's speed our kernels reach was fitted to figures of one H200 (`bench/roofline.py --fit`); for
any other card a prediction is arithmetic, not measured, and whoever prints it must say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import add

from voltapile.shm.formats import format_of
from voltapile.topology.gpu import Gpu
from voltapile.topology.overrides import role_of
from voltapile.topology.plan import CacheGroup, Placement, Plan
from voltapile.topology.spec import Spec

TILE = 8  # tokens of a tensor core's tile: fewer cost as much
ROWS_AT_ONCE = 16  # tokens for which the engine of few rows reads a weight once
CLUSTER_ARCH, CLUSTER_ROWS = 90, 32  # and where clusters of blocks share what they read
MANY_ROWS = 64  # of a prompt, from which on a weight is unpacked to halves for cuBLAS
LAYER_LAUNCHES, STEP_LAUNCHES = 8, 8  # of a decode step
MANY_LAYER_LAUNCHES = 30  # of a prompt's layer, with its weights unpacked

# Part of a card's name: (bytes a second that a plain read reaches, fp16 tensor FLOP/s that a large
# product reaches, instructions a second of all warps: four a clock and multiprocessor). H200:
# measured for this project. V100: what public work reports, the middle of 750 to 850 GB/s, and
# cuBLAS. The others: datasheets times the H200's shares of its own.
REACHED_BYTES, REACHED_FLOPS = 3.95 / 4.8, 790 / 989
KNOWN: dict[str, tuple[float, float, float]] = {
    "H200": (3.95e12, 790e12, 927e9),
    "V100": (800e9, 98e12, 490e9),
    "H100 PCIe": (2.0e12 * REACHED_BYTES, 756e12 * REACHED_FLOPS, 739e9),
    "H100 NVL": (3.9e12 * REACHED_BYTES, 835e12 * REACHED_FLOPS, 845e9),
    "H100": (3.35e12 * REACHED_BYTES, 989e12 * REACHED_FLOPS, 927e9),
    "A100": (1.94e12 * REACHED_BYTES, 312e12 * REACHED_FLOPS, 609e9),
    "A40": (696e9 * REACHED_BYTES, 150e12 * REACHED_FLOPS, 585e9),
    "L40": (864e9 * REACHED_BYTES, 181e12 * REACHED_FLOPS, 1414e9),
    "TITAN V": (653e9 * REACHED_BYTES, 110e12 * REACHED_FLOPS, 466e9),
    "T4": (320e9 * REACHED_BYTES, 65e12 * REACHED_FLOPS, 216e9),
    "RTX 2080 Ti": (616e9 * REACHED_BYTES, 54e12 * REACHED_FLOPS, 420e9),
    "TITAN RTX": (672e9 * REACHED_BYTES, 130e12 * REACHED_FLOPS, 510e9),
    "RTX 3090": (936e9 * REACHED_BYTES, 71e12 * REACHED_FLOPS, 556e9),
    "RTX 4090": (1.01e12 * REACHED_BYTES, 165e12 * REACHED_FLOPS, 1290e9),
    "RTX 5090": (1.79e12 * REACHED_BYTES, 210e12 * REACHED_FLOPS, 1639e9),
}
# For each byte, of a card that is not listed and tells its memory's clock and width.
FLOPS_A_BYTE = {70: 125, 75: 90, 80: 160, 86: 76, 89: 163, 90: 290, 100: 280, 120: 117}
ISSUES_A_BYTE = 0.3
# Of a product of few rows, whose instructions unpack weights: ncu counts 400 in 16 x 256 of Q4_K,
# which serve eight tokens.
FLOP_AN_ISSUE = 2 * 16 * 256 * 8 / 400


@dataclass(frozen=True)
class Card:
    """What a GPU reaches: bytes, fp16 tensor FLOP, and instructions of warps, a second.
    is_measured: by this project. at_once: tokens of a product of few rows that a weight is read
    for."""

    name: str
    bandwidth: float
    flops: float
    issues: float
    is_measured: bool = False
    at_once: int = ROWS_AT_ONCE


@dataclass(frozen=True)
class Work:
    """What a step takes. Kinds of arithmetic differ in the share of a card that they reach."""

    tokens: int = 0  # that it computes
    weights: float = 0.0  # bytes read (a prompt's unpacked halves: written and read, too)
    cache: float = 0.0  # bytes of keys and values read
    few: float = 0.0  # FLOP of products of few rows
    many: float = 0.0  # FLOP of products of many rows
    attention: float = 0.0  # FLOP of attention
    launches: int = 0

    @property
    def bytes(self) -> float:
        return self.weights + self.cache

    @property
    def flops(self) -> float:
        return self.few + self.many + self.attention

    def __add__(self, other: Work) -> Work:
        return Work(*map(add, astuple(self), astuple(other)))


# What the cuda backend reaches of bandwidth or arithmetic, and launches a second. Of one H200: some
# measured alone, the others fitted by bench/roofline.py --fit. One stream of an 8B comes out within
# 15 % of what was measured, several up to half too fast.
OURS = {
    "weights": 0.98,
    "cache": 0.92,
    "few": 1.0,
    "many": 0.663,
    "attention": 0.344,
    "launch": 6.5e5,
}


def card_of(gpu: Gpu) -> Card | None:
    """None for a card that is neither listed nor tells enough."""
    at_once = CLUSTER_ROWS if gpu.arch == CLUSTER_ARCH else ROWS_AT_ONCE
    for part, speeds in KNOWN.items():
        if part in gpu.name:
            return Card(gpu.name, *speeds, part == "H200", at_once)
    known = [arch for arch in FLOPS_A_BYTE if arch <= gpu.arch]
    if not gpu.bandwidth or not known:
        return None
    flops = gpu.bandwidth * FLOPS_A_BYTE[max(known)]
    issues = gpu.bandwidth * ISSUES_A_BYTE
    speeds = gpu.bandwidth * REACHED_BYTES, flops * REACHED_FLOPS, issues
    return Card(gpu.name, *speeds, at_once=at_once)


def decode(spec: Spec, plan: Plan, contexts: Sequence[int], at_once: int = ROWS_AT_ONCE) -> Work:
    """One token of each stream; contexts: positions that each of them sees, its own included.
    at_once: the card's."""
    rows = len(contexts)
    read, params = _weights(spec, plan, rows)
    seen = [(group, _seen(group, context)) for group in plan.caches for context in contexts]
    scores = sum(_attention_flops(spec, group, count) for group, count in seen)
    return Work(
        tokens=rows,
        weights=read * -(-rows // at_once),
        cache=sum(_token_bytes(group) * count for group, count in seen),
        few=2.0 * params * rows,
        attention=scores,
        launches=LAYER_LAUNCHES * spec.layers + STEP_LAUNCHES,
    )


def prefill(
    spec: Spec, plan: Plan, tokens: int, start: int = 0, at_once: int = ROWS_AT_ONCE
) -> Work:
    """A prompt's `tokens` behind `start` computed ones, in steps of the Plan's size."""
    total = Work()
    for first in range(start, start + tokens, plan.batch_tokens):
        size = min(plan.batch_tokens, start + tokens - first)
        total += _chunk(spec, plan, first, size, at_once)
    return total


def seconds(work: Work, card: Card, shares: Mapping[str, float] = OURS) -> float:
    """Predicted. Parts add up, since each kernel is bound by one of them; products of few rows are
    bound by their weights or by their arithmetic, whichever takes longer."""
    parts = {name: each / shares[name] for name, each in costs(work, card).items()}
    return sum(parts.values()) - min(parts["weights"], parts["few"])


def costs(work: Work, card: Card) -> dict[str, float]:
    """Seconds of each part at the card's full speed, and launches."""
    rounded = -(-work.tokens // TILE) * TILE / max(1, work.tokens)
    return {
        "weights": work.weights / card.bandwidth,
        "cache": work.cache / card.bandwidth,
        "few": work.few * rounded / (card.issues * FLOP_AN_ISSUE),
        "many": work.many / card.flops,
        "attention": work.attention / card.flops,
        "launch": float(work.launches),
    }


def limit(work: Work, card: Card) -> float:
    """Seconds that nobody can go below: all bytes, or all arithmetic, at full speed. Unpacked
    halves count, so of a prompt only arithmetic is a limit."""
    arithmetic = work.flops / card.flops
    return arithmetic if work.many else max(work.bytes / card.bandwidth, arithmetic)


def _chunk(spec: Spec, plan: Plan, first: int, tokens: int, at_once: int) -> Work:
    """One step of a prompt; its last token alone takes the output matrix."""
    if tokens < MANY_ROWS:
        return decode(spec, plan, range(first + 1, first + tokens + 1), at_once)
    head = _head(spec, plan.tensors)
    read, params = _weights(spec, plan, tokens)
    inner = params - _params(head)
    scores = sum(
        _attention_flops(
            spec, group, sum(_seen(group, p + 1) for p in range(first, first + tokens))
        )
        for group in plan.caches
    )
    return Work(
        tokens=tokens,
        weights=read + 4.0 * inner,
        cache=sum(_token_bytes(group) * _seen(group, first + tokens) for group in plan.caches),
        few=2.0 * _params(head),
        many=2.0 * inner * tokens,
        attention=scores,
        launches=MANY_LAYER_LAUNCHES * spec.layers + STEP_LAUNCHES,
    )


def _weights(spec: Spec, plan: Plan, rows: int) -> tuple[float, float]:
    """Bytes that a step of so many rows reads, and values that each of them is multiplied with. Of
    an embedding it reads rows, unless that is the output matrix too; of experts those that rows
    choose, as if each choice were as likely."""
    unread = {"ngram"} if spec.tied else {"ngram", "embed"}
    read = params = 0.0
    for name, each in plan.tensors.items():
        role, used = role_of(name, spec), 1.0
        if role in unread:
            continue
        if spec.experts and role == "experts":
            used = spec.experts.used / spec.experts.count
        read += each.bytes * (1 - (1 - used) ** rows)
        params += _params(each) * used
    return read, params


def _head(spec: Spec, tensors: Mapping[str, Placement]) -> Placement:
    return tensors["token_embd.weight" if spec.tied else "output.weight"]


def _params(tensor: Placement) -> float:
    kind = format_of(tensor.type)
    return tensor.bytes / kind.block_bytes * kind.block_len


def _seen(group: CacheGroup, context: int) -> int:
    return min(context, group.window) if group.window else context


def _token_bytes(group: CacheGroup) -> float:
    return group.page_bytes / group.page_tokens


def _attention_flops(spec: Spec, group: CacheGroup, positions: int) -> float:
    """Products of queries and keys, and of weights and values."""
    return 2.0 * len(group.layers) * spec.heads * (group.key_dim + group.value_dim) * positions
