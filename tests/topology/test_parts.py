"""What a rank keeps of a tensor: each row and column has an owner, bytes are those of the parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from voltapile.shm.gguf import Gguf, Tensor
from voltapile.topology.architectures import spec_of
from voltapile.topology.parts import Part, joined, part_of
from voltapile.topology.share import Share, layer_shares, tensor_shares, whole
from voltapile.topology.spec import Spec

MINI = Path(__file__).parents[1] / "data" / "golden-mini"
NAMES = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma3",
    "qwen3moe",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "qwen4exp",
]


@pytest.fixture(params=NAMES)
def gguf(request: pytest.FixtureRequest) -> Iterator[Gguf]:
    with Gguf.open(MINI / request.param / "model-f16.gguf") as gguf:
        yield gguf


def mask(tensor: Tensor, part: Part) -> np.ndarray:
    """bool[experts, rows, columns] of what is kept."""
    shape = (1, *tensor.shape, 1)[-3:] if len(tensor.shape) == 1 else (1, *tensor.shape)[-3:]
    rows, columns = np.zeros(shape[1], bool), np.zeros(shape[2], bool)
    for begin, end in part.rows:
        rows[begin:end] = True
    for begin, end in part.column_parts:
        columns[begin:end] = True
    kept = np.zeros(shape, bool)
    kept[slice(*part.experts)] = rows[:, None] & columns
    return kept


def shares_of(spec: Spec, ranks: int, mode: str) -> list[Share]:
    if mode == "layer":
        return layer_shares(spec, [1.0] * ranks)
    return tensor_shares(spec, [1.0] * ranks, 32, 32 if mode == "tensor" else 0, 32)


@pytest.mark.parametrize("mode", ["tensor", "experts", "layer"])
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_every_value_has_an_owner(gguf: Gguf, ranks: int, mode: str) -> None:
    spec = spec_of(gguf)
    shares = shares_of(spec, ranks, mode)
    for tensor in gguf.tensors.values():
        parts = [part_of(tensor, spec, share) for share in shares]
        masks = [mask(tensor, part) for part in parts]
        assert np.any(masks, axis=0).all(), tensor.name
        size = tensor.nbytes / masks[0].size
        for part, kept in zip(parts, masks, strict=True):
            assert part.bytes == int(kept.sum()) * size, tensor.name


def test_alone_is_everything(gguf: Gguf) -> None:
    spec = spec_of(gguf)
    for tensor in gguf.tensors.values():
        part = part_of(tensor, spec, whole(spec))
        assert (part.split, part.bytes) == ("none", tensor.nbytes)


def test_a_block_that_straddles_is_kept_by_both() -> None:
    with Gguf.open(MINI / "llama" / "model-f16.gguf") as gguf:
        spec = spec_of(gguf)  # 6 heads of 32: 192 columns
    output = Tensor("blk.0.attn_output.weight", "Q4_0", 2, (96, 192), 96 * 6 * 18, 0, 0)
    wide = Tensor("blk.0.attn_output.weight", "Q4_K", 12, (96, 256), 96 * 144, 0, 0)
    shares = tensor_shares(spec, [1.0, 1.0, 1.0, 1.0], 32)  # heads 0-1, 2, 3, 4-5
    columns = [part_of(output, spec, share).columns for share in shares]
    assert columns == [(0, 64), (64, 96), (96, 128), (128, 192)]
    assert [part_of(wide, spec, share).columns for share in shares] == [(0, 256)] * 4


def test_gate_and_query_go_together() -> None:
    with Gguf.open(MINI / "qwen35" / "model-f16.gguf") as gguf:
        spec = spec_of(gguf)  # 5 heads of 64, each with a gate
        shares = tensor_shares(spec, [1.0, 1.0], 32)
        tensor = gguf.tensors["blk.1.attn_q.weight"]
        rows = [part_of(tensor, spec, share).rows for share in shares]
    assert rows == [((0, 256),), ((256, 640),)]


def test_delta_heads_are_lists() -> None:
    """Six value heads over two key heads, in turn: rank 0 of 2 has heads 0, 2 and 4."""
    with Gguf.open(MINI / "qwen35" / "model-f16.gguf") as gguf:
        spec = spec_of(gguf)
        first = tensor_shares(spec, [1.0, 1.0], 32)[0]
        assert (first.key_heads, first.value_heads) == ([0], [0, 2, 4])
        qkv = part_of(gguf.tensors["blk.0.attn_qkv.weight"], spec, first)
        out = part_of(gguf.tensors["blk.0.ssm_out.weight"], spec, first)
    assert qkv.rows == ((0, 32), (64, 96), (128, 160), (192, 224), (256, 288))
    assert out.column_parts == ((0, 32), (64, 96), (128, 160))


def test_joined() -> None:
    assert joined([(0, 2), (2, 2), (2, 3), (5, 6), (5, 9)]) == ((0, 3), (5, 9))
