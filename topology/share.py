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


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank computes. Numbers are the model's own; local ones count from 0 in this order.

    A product over a part of the columns (attn_output, ffn_down) gives a part of a sum, which
    all_reduce completes; rows of attn_q, attn_k, attn_v, ffn_gate, ffn_up and output are cut.
    """

    layers: list[int]  # that run here, in order
    heads: Range  # query heads
    kv_heads: Range  # whose keys and values are kept here
    head_map: list[int]  # local query head -> local KV head
    ffn: Range  # columns of gate and up, and of down's input
    vocab: Range  # rows of the output matrix
    vocab_parts: list[int] = []  # how many rows each rank has; []: this one's sums are whole
    embeds: bool = True  # begins with the token embedding, rather than with what a rank hands on
    answers: bool = True  # ends with the output matrix, rather than handing on
    previous: int = -1  # the rank that hands on to this one
    following: int = -1  # the rank that this one hands on to

    @property
    def is_part(self) -> bool:
        """Other ranks compute the rest of the same layers: sums need all of them."""
        return bool(self.vocab_parts)


def whole(spec: Spec) -> Share:
    """The Share of a rank that is alone."""
    return tensor_shares(spec, [1.0], 1)[0]


def tensor_shares(spec: Spec, proportions: Sequence[float], ffn_unit: int) -> list[Share]:
    """One Share for each of `proportions` (-ts): all layers, a part of each.

    ffn_unit: columns of ffn_down that stay together, e.g. the 256 of a quantisation block."""
    heads = divide(spec.heads, proportions)
    ffn = divide(spec.ffn, proportions, ffn_unit)
    vocab = divide(spec.vocab, proportions, 64)
    sizes = [end - begin for begin, end in vocab] if len(vocab) > 1 else []
    return [
        msgspec.structs.replace(_share(spec, list(range(spec.layers)), *parts), vocab_parts=sizes)
        for parts in zip(heads, ffn, vocab, strict=True)
    ]


def layer_shares(spec: Spec, proportions: Sequence[float]) -> list[Share]:
    """One Share for each of `proportions`: neighbouring layers, whole."""
    stages = divide(spec.layers, proportions)
    parts = (0, spec.heads), (0, spec.ffn), (0, spec.vocab)
    whole_layers = [_share(spec, list(range(*stage)), *parts) for stage in stages]
    last = len(stages) - 1
    return [
        msgspec.structs.replace(
            share,
            embeds=i == 0,
            answers=i == last,
            previous=i - 1,
            following=-1 if i == last else i + 1,
        )
        for i, share in enumerate(whole_layers)
    ]


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
