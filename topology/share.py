"""Share: which heads, columns, rows and layers of a model one rank computes. Pure arithmetic.

Parts are neighbours: a rank's heads are a range, and so are its columns and its vocabulary.
Nothing has to divide: parts may differ in size, a KV head that two ranks need is kept by both, and
a rank may own nothing. Knows neither devices nor files; a model reads its Share, not their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
from voltapile.topology.spec import Spec

Range = tuple[int, int]  # begin, end; equal: nothing


class KvRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Of the positions of every KV head a rank keeps run number `part` of each `parts`."""

    part: int
    parts: int
    run: int  # positions
    heads: list[int]  # how many query heads each rank has


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank computes. Numbers are the model's own; local ones count from 0 in this order.

    A product over a part of the columns (attn_output, ffn_down) gives a part of a sum, which
    all_reduce completes; rows of attn_q, attn_k, attn_v, ffn_gate, ffn_up and output are cut.
    """

    layers: list[int]  # that run here, in order
    heads: Range  # query heads
    kv_heads: Range  # whose keys and values are kept here
    head_map: list[int]  # query head that is looked at here -> local KV head
    ffn: Range  # columns of gate and up, and of down's input
    vocab: Range  # rows of the output matrix
    vocab_parts: list[int] = []  # how many rows each rank has; []: this one's sums are whole
    embeds: bool = True  # begins with the token embedding, rather than with what a rank hands on
    answers: bool = True  # ends with the output matrix, rather than handing on
    experts: Range = (0, 0)  # routed experts, of each layer
    expert_ffn: Range = (0, 0)  # columns of each of them
    shared_ffn: Range = (0, 0)  # columns of the shared expert
    key_heads: list[int] = []  # of delta nets
    value_heads: list[int] = []  # of delta nets
    kv_runs: KvRuns | None = None  # all query heads look at some positions; None: own ones at all
    previous: int = -1  # the rank that hands on to this one
    following: int = -1  # the rank that this one hands on to

    @property
    def is_part(self) -> bool:
        """Other ranks compute the rest of the same layers: sums need all of them."""
        return bool(self.vocab_parts)


def whole(spec: Spec) -> Share:
    """The Share of a rank that is alone."""
    return tensor_shares(spec, [1.0], 1)[0]


def tensor_shares(
    spec: Spec,
    proportions: Sequence[float],
    ffn_unit: int,
    expert_unit: int = 0,
    shared_unit: int = 1,
    delta_unit: int = 1,
) -> list[Share]:
    """One Share for each of `proportions` (-ts): all layers, a part of each.

    ffn_unit: columns of ffn_down that stay together, e.g. the 256 of a quantisation block;
    shared_unit: of the shared expert. expert_unit: of each routed expert; 0: experts stay whole,
    and each rank has some of them. delta_unit: value heads that stay together."""
    heads = divide(spec.heads, proportions)
    ffn = divide(spec.ffn, proportions, ffn_unit)
    vocab = divide(spec.vocab, proportions, 64)
    sizes = [end - begin for begin, end in vocab] if len(vocab) > 1 else []
    layers = list(range(spec.layers))
    plain = [_share(spec, layers, *parts) for parts in zip(heads, ffn, vocab, strict=True)]
    experts = _expert_parts(spec, proportions, expert_unit, shared_unit)
    delta = _delta_parts(spec, proportions, delta_unit)
    return [
        msgspec.structs.replace(share, vocab_parts=sizes, **experts[rank], **delta[rank])
        for rank, share in enumerate(plain)
    ]


def by_positions(spec: Spec, shares: Sequence[Share], run: int) -> list[Share]:
    """The same, with keys and values shared out by runs of positions instead of by head: every rank
    keeps all KV heads, at some of the positions."""
    sizes = [share.heads[1] - share.heads[0] for share in shares]
    head_map = [head * spec.kv_heads // spec.heads for head in range(spec.heads)]
    return [
        msgspec.structs.replace(
            share,
            kv_heads=(0, spec.kv_heads),
            head_map=head_map,
            kv_runs=KvRuns(part=rank, parts=len(shares), run=run, heads=sizes),
        )
        for rank, share in enumerate(shares)
    ]


def layer_shares(spec: Spec, proportions: Sequence[float]) -> list[Share]:
    """One Share for each of `proportions`: neighbouring layers, whole."""
    stages = divide(spec.layers, proportions)
    last = len(stages) - 1
    return [
        msgspec.structs.replace(
            whole(spec),
            layers=list(range(*stage)),
            embeds=i == 0,
            answers=i == last,
            previous=i - 1,
            following=-1 if i == last else i + 1,
        )
        for i, stage in enumerate(stages)
    ]


def _expert_parts(
    spec: Spec, proportions: Sequence[float], unit: int, shared_unit: int
) -> list[dict[str, Range]]:
    """Whole experts for each rank, or a part of every expert."""
    if spec.experts is None:
        return [{} for _ in proportions]
    count, ffn = spec.experts.count, spec.experts.ffn
    everything = [1.0] if unit else proportions
    owned = divide(count, everything) * (len(proportions) if unit else 1)
    columns = divide(ffn, proportions, unit) if unit else [(0, ffn)] * len(proportions)
    shared = divide(spec.experts.shared_ffn, proportions, shared_unit)
    return [
        {"experts": experts, "expert_ffn": part, "shared_ffn": common}
        for experts, part, common in zip(owned, columns, shared, strict=True)
    ]


def _delta_parts(spec: Spec, proportions: Sequence[float], unit: int) -> list[dict[str, list[int]]]:
    """Value heads in the order of their key heads, so that few ranks share a key head; `unit`
    neighbours stay together."""
    delta = spec.delta
    if delta is None:
        return [{} for _ in proportions]
    firsts = range(0, delta.value_heads, unit)
    firsts_in_order = sorted(firsts, key=lambda head: (delta.key_head(head), head))
    units = [range(head, min(head + unit, delta.value_heads)) for head in firsts_in_order]
    order = [head for each in units for head in each]
    parts = []
    for begin, end in divide(delta.value_heads, proportions, unit):
        heads = sorted(order[begin:end])
        parts.append(
            {"value_heads": heads, "key_heads": sorted({delta.key_head(head) for head in heads})}
        )
    return parts


def divide(total: int, proportions: Sequence[float], unit: int = 1) -> list[Range]:
    """Ranges that cover 0..total in order, as near to `proportions` as whole units allow."""
    assert min(proportions) >= 0 < sum(proportions), proportions
    units = -(-total // unit)
    before, edges = 0.0, [0]
    for proportion in proportions:
        before += proportion
        edges.append(min(total, unit * round(units * before / sum(proportions))))
    return list(pairwise(edges))


def _share(spec: Spec, layers: list[int], heads: Range, ffn: Range, vocab: Range) -> Share:
    of = [head * spec.kv_heads // spec.heads for head in range(*heads)]
    kv_heads = (of[0], of[-1] + 1) if of else (0, 0)
    return Share(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_map=[kv_head - kv_heads[0] for kv_head in of],
        ffn=ffn,
        vocab=vocab,
    )
