"""What a rank keeps of each tensor: experts, rows, columns or all of it, by its name and the Share.

Pure arithmetic. A quantisation block that two ranks need is kept by both, so parts may overlap; a
part may be empty. Knows neither tiers nor devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from voltapile.shm.formats import format_of, row_bytes
from voltapile.shm.gguf import Tensor
from voltapile.topology.share import Range, Share
from voltapile.topology.spec import Spec

Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class Part:
    """Of one tensor. experts: its first axis, where it has three. rows: ranges of its rows (of a
    vector: its elements), in order; column_parts: of each row, whole quantisation blocks."""

    split: str  # none | experts | rows | columns
    experts: Range
    rows: Ranges
    column_parts: Ranges
    bytes: int
    is_copied: bool = False  # what is kept does not lie in the file as one piece

    @property
    def columns(self) -> Range:
        """From the first column that is kept to the last one."""
        if not self.column_parts:
            return 0, 0
        return self.column_parts[0][0], self.column_parts[-1][1]


@dataclass(frozen=True)
class Cut:
    """What a Share needs of a tensor; None: all of it."""

    rows: Ranges | None = None
    columns: Ranges | None = None
    experts: Range | None = None


WHOLE = Cut()
NOTHING = Cut(rows=())
Rule = Callable[[Spec, Share], Cut]


def part_of(tensor: Tensor, spec: Spec, share: Share) -> Part:
    """What a rank of this Share keeps of the tensor."""
    cut = cut_of(tensor.name, spec, share)
    count, length, width = _axes(tensor)
    experts = (0, count) if cut.experts is None else cut.experts
    rows = ((0, length),) if cut.rows is None else joined(cut.rows)
    columns = ((0, width),) if cut.columns is None else joined(_blocks(tensor, cut.columns))
    split = "none"
    if experts != (0, count):
        split = "experts"
    elif columns != ((0, width),):
        split = "columns"
    elif rows != ((0, length),):
        split = "rows"
    is_cut = columns != ((0, width),) or (len(tensor.shape) == 3 and rows != ((0, length),))
    is_copied = is_cut or (len(rows) > 1 and _has_delta(tensor.name, spec))
    is_copied |= tensor.name.split(".")[2:3] in (["ffn_gate_up_exps"], ["ssm_in"])  # taken apart
    size = _bytes(tensor, experts, rows, columns)
    return Part(split, experts, rows, columns, size, is_copied and size > 0)


def cut_of(name: str, spec: Spec, share: Share) -> Cut:
    """Which part of the tensor the rank computes with."""
    if name in spec.unknown_tensors:
        return NOTHING
    if not name.startswith("blk."):
        rule = _ENDS.get(name)
        return rule(spec, share) if rule else WHOLE
    _, number, stem, *suffix = name.split(".")
    if int(number) not in share.layers:
        return NOTHING
    if suffix in (["scale"], ["input_scale"]):
        return WHOLE
    rule = (_DELTA.get(stem) if _has_delta(name, spec) else None) or _LAYER.get(stem)
    is_summed = suffix == ["bias"] and rule in _SUMMED  # added once, to the sum
    return rule(spec, share) if rule and not is_summed else WHOLE


def _has_delta(name: str, spec: Spec) -> bool:
    """It is a tensor of a layer with a delta net, whose heads are lists."""
    layer = int(name.split(".")[1]) if name.startswith("blk.") else -1
    return spec.delta is not None and layer in spec.delta.layers


# --- attention and the dense feed-forward net -----------------------------------------------------


def _heads(*which: str) -> Rule:
    """Rows of q, k and v, one behind another where they are one tensor."""

    def cut(spec: Spec, share: Share) -> Cut:
        gate = 2 if spec.has_output_gate else 1  # behind each head's query
        sizes = {
            "q": (spec.heads, share.heads, gate * spec.key_dim),
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
    return Cut(columns=((begin * spec.value_dim, end * spec.value_dim),))


def _ffn_rows(spec: Spec, share: Share) -> Cut:
    return Cut(rows=(share.ffn,))


def _ffn_columns(spec: Spec, share: Share) -> Cut:
    return Cut(columns=(share.ffn,))


# --- experts --------------------------------------------------------------------------------------


def _expert_rows(spec: Spec, share: Share) -> Cut:
    return Cut(experts=share.experts, rows=(share.expert_ffn,))


def _expert_gate_up(spec: Spec, share: Share) -> Cut:
    assert spec.experts is not None
    begin, end = share.expert_ffn
    up = spec.experts.ffn
    return Cut(experts=share.experts, rows=(share.expert_ffn, (up + begin, up + end)))


def _expert_columns(spec: Spec, share: Share) -> Cut:
    return Cut(experts=share.experts, columns=(share.expert_ffn,))


def _shared_rows(spec: Spec, share: Share) -> Cut:
    return Cut(rows=(share.shared_ffn,))


def _shared_columns(spec: Spec, share: Share) -> Cut:
    return Cut(columns=(share.shared_ffn,))


# --- delta nets -----------------------------------------------------------------------------------


def _delta_channels(spec: Spec, share: Share) -> Cut:
    """Rows of q, k and v, as projection and convolution have them."""
    assert spec.delta is not None
    dim, inner = spec.delta.head_dim, spec.delta.key_heads * spec.delta.head_dim
    starts = (0, share.key_heads), (inner, share.key_heads), (2 * inner, share.value_heads)
    return Cut(rows=tuple(r for start, heads in starts for r in _spread(heads, dim, start)))


def _delta_values(spec: Spec, share: Share) -> Cut:
    assert spec.delta is not None
    return Cut(rows=_spread(share.value_heads, spec.delta.head_dim))


def _delta_outputs(spec: Spec, share: Share) -> Cut:
    assert spec.delta is not None
    return Cut(columns=_spread(share.value_heads, spec.delta.head_dim))


def _delta_scalars(spec: Spec, share: Share) -> Cut:
    return Cut(rows=_spread(share.value_heads, 1))


def _delta_groups(rows_of_value_head: int, rows_of_key_head: int) -> Rule:
    """Rows that lie together by key head, with those of all of its value heads."""

    def cut(spec: Spec, share: Share) -> Cut:
        assert spec.delta is not None
        delta = spec.delta
        values = delta.value_heads // delta.key_heads
        unit = delta.head_dim if rows_of_key_head else 1
        size = unit * (rows_of_key_head + rows_of_value_head * values)
        return Cut(rows=_spread(share.key_heads, size))

    return cut


# --- before and behind the layers -----------------------------------------------------------------


def _embedding(spec: Spec, share: Share) -> Cut:
    """Whole, since a token may be any row; a tied output matrix is rows of it."""
    return WHOLE if share.embeds or (spec.tied and share.answers) else NOTHING


def _head(spec: Spec, share: Share) -> Cut:
    return Cut(rows=(share.vocab,)) if share.answers else NOTHING


def _last(spec: Spec, share: Share) -> Cut:
    return WHOLE if share.answers else NOTHING


def _ngram_table(spec: Spec, share: Share) -> Cut:
    has_layer = spec.ngrams is not None and spec.ngrams.layer in share.layers
    return WHOLE if has_layer else NOTHING


_LAYER: dict[str, Rule] = {
    "attn_q": _heads("q"),
    "attn_k": _heads("k"),
    "attn_v": _heads("v"),
    "attn_qkv": _heads("q", "k", "v"),
    "attn_output": _outputs,
    "ffn_gate": _ffn_rows,
    "ffn_up": _ffn_rows,
    "ffn_down": _ffn_columns,
    "ffn_gate_exps": _expert_rows,
    "ffn_up_exps": _expert_rows,
    "ffn_gate_up_exps": _expert_gate_up,
    "ffn_down_exps": _expert_columns,
    "ffn_gate_shexp": _shared_rows,
    "ffn_up_shexp": _shared_rows,
    "ffn_down_shexp": _shared_columns,
}
_DELTA: dict[str, Rule] = {
    "attn_qkv": _delta_channels,
    "attn_gate": _delta_values,
    "ssm_conv1d": _delta_channels,
    "ssm_beta": _delta_scalars,
    "ssm_alpha": _delta_scalars,
    "ssm_ba": _delta_groups(2, 0),
    "ssm_in": _delta_groups(2, 2),
    "ssm_a": _delta_scalars,
    "ssm_dt": _delta_scalars,
    "ssm_out": _delta_outputs,
}
_SUMMED = (_outputs, _ffn_columns)  # whose products are parts of a sum
_ENDS: dict[str, Rule] = {
    "token_embd.weight": _embedding,
    "per_layer_token_embd.weight": _ngram_table,
    "output.weight": _head,
    "output.bias": _head,
    "output_norm.weight": _last,
    "output_hc_norm.weight": _last,
    "output_hc_down.weight": _last,
    "output_hc_up.weight": _last,
}


def joined(ranges: Iterable[Range]) -> Ranges:
    """In order, without empty ones; those that touch or overlap as one."""
    found: list[Range] = []
    for begin, end in ranges:
        if found and begin <= found[-1][1] and begin < end:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif begin < end:
            found.append((begin, end))
    return tuple(found)


def _spread(heads: Sequence[int], size: int, start: int = 0) -> Ranges:
    return tuple((start + head * size, start + (head + 1) * size) for head in heads)


def _axes(tensor: Tensor) -> tuple[int, int, int]:
    """Experts, rows, columns; 1 for an axis that the tensor has not."""
    shape = tensor.shape
    if len(shape) == 1:
        return 1, shape[0], 1
    return (1, *shape) if len(shape) == 2 else (shape[0], shape[1], shape[-1])


def _blocks(tensor: Tensor, columns: Ranges) -> Ranges:
    """The columns with the rest of the quantisation blocks that they lie in."""
    unit = format_of(tensor.type_name).block_len
    return tuple(
        (begin // unit * unit, -(-end // unit) * unit) for begin, end in columns if begin < end
    )


def _bytes(tensor: Tensor, experts: Range, rows: Ranges, columns: Ranges) -> int:
    count = (experts[1] - experts[0]) * sum(end - begin for begin, end in rows)
    if len(tensor.shape) == 1:
        return row_bytes(tensor.type_name, count)
    return count * row_bytes(tensor.type_name, sum(end - begin for begin, end in columns))
