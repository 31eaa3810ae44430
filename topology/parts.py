"""What a rank keeps of each tensor: rows, columns or all of it, by the tensor's name and its Share.

Pure arithmetic. A quantisation block that two ranks need is kept by both, so parts may overlap; a
part may be empty. Knows neither tiers nor devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from voltapile.shm.formats import format_of, row_bytes
from voltapile.shm.gguf import Tensor
from voltapile.topology.share import Range, Share
from voltapile.topology.spec import Spec


@dataclass(frozen=True)
class Part:
    """Of one tensor. rows: ranges of its rows (of a vector: its elements), in order; columns: of
    each row, whole quantisation blocks."""

    split: str  # none | rows | columns
    rows: tuple[Range, ...]
    columns: Range
    bytes: int


@dataclass(frozen=True)
class Cut:
    """What a Share needs of a tensor: ranges of rows, or a range of columns."""

    rows: tuple[Range, ...] | None = None
    columns: Range | None = None


WHOLE = Cut()
NOTHING = Cut(rows=())


def part_of(tensor: Tensor, spec: Spec, share: Share) -> Part:
    """What a rank of this Share keeps of the tensor."""
    cut = cut_of(tensor.name, spec, share)
    count, width = tensor.shape[0], tensor.shape[-1] if len(tensor.shape) > 1 else 1
    columns = (0, width) if cut.columns is None else _blocks(tensor, cut.columns)
    rows = ((0, count),) if cut.rows is None else _joined(cut.rows)
    split = "columns" if columns != (0, width) else "rows" if rows != ((0, count),) else "none"
    return Part(split, rows, columns, _bytes(tensor, rows, columns))


def cut_of(name: str, spec: Spec, share: Share) -> Cut:
    """Which part of the tensor the rank computes with."""
    if name.startswith("blk."):
        _, layer, stem, *suffix = name.split(".")
        if int(layer) not in share.layers:
            return NOTHING
        rule = _LAYER.get(stem)
        is_summed = suffix == ["bias"] and rule in _SUMMED  # added once, to the sum
        return rule(spec, share) if rule and not is_summed else WHOLE
    rule = _ENDS.get(name)
    return rule(spec, share) if rule else WHOLE


def _heads(*which: str) -> Callable[[Spec, Share], Cut]:
    """Rows of q, k and v, one behind another where they are one tensor."""

    def cut(spec: Spec, share: Share) -> Cut:
        sizes = {
            "q": (spec.heads, share.heads, spec.key_dim),
            "k": (spec.kv_heads, share.kv_heads, spec.key_dim),
            "v": (spec.kv_heads, share.kv_heads, spec.value_dim),
        }
        rows, start = [], 0
        for letter in which:
            count, (begin, end), dim = sizes[letter]
            rows.append((start + begin * dim, start + end * dim))
            start += count * dim
        return Cut(rows=tuple(rows))

    return cut


def _outputs(spec: Spec, share: Share) -> Cut:
    begin, end = share.heads
    return Cut(columns=(begin * spec.value_dim, end * spec.value_dim))


def _ffn_rows(spec: Spec, share: Share) -> Cut:
    return Cut(rows=(share.ffn,))


def _ffn_columns(spec: Spec, share: Share) -> Cut:
    return Cut(columns=share.ffn)


def _embedding(spec: Spec, share: Share) -> Cut:
    """Whole, since a token may be any row; a tied output matrix is rows of it."""
    return WHOLE if share.embeds or (spec.tied and share.answers) else NOTHING


def _head(spec: Spec, share: Share) -> Cut:
    return Cut(rows=(share.vocab,)) if share.answers else NOTHING


def _last(spec: Spec, share: Share) -> Cut:
    return WHOLE if share.answers else NOTHING


_LAYER: dict[str, Callable[[Spec, Share], Cut]] = {
    "attn_q": _heads("q"),
    "attn_k": _heads("k"),
    "attn_v": _heads("v"),
    "attn_qkv": _heads("q", "k", "v"),
    "attn_output": _outputs,
    "ffn_gate": _ffn_rows,
    "ffn_up": _ffn_rows,
    "ffn_down": _ffn_columns,
}
_SUMMED = (_outputs, _ffn_columns)  # whose products are parts of a sum
_ENDS: dict[str, Callable[[Spec, Share], Cut]] = {
    "token_embd.weight": _embedding,
    "output.weight": _head,
    "output.bias": _head,
    "output_norm.weight": _last,
}


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Without empty ones, neighbours as one."""
    joined: list[Range] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        elif begin < end:
            joined.append((begin, end))
    return tuple(joined)


def _blocks(tensor: Tensor, columns: Range) -> Range:
    """The columns with the rest of the quantisation blocks that they lie in."""
    if columns[0] == columns[1]:
        return columns
    unit = format_of(tensor.type_name).block_len
    return columns[0] // unit * unit, -(-columns[1] // unit) * unit


def _bytes(tensor: Tensor, rows: Sequence[Range], columns: Range) -> int:
    count = sum(end - begin for begin, end in rows)
    if len(tensor.shape) == 1:
        return row_bytes(tensor.type_name, count)
    return count * row_bytes(tensor.type_name, columns[1] - columns[0])
