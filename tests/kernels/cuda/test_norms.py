"""Products that norm what they read: the bits of a norm that is launched, and who launches one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import clusters, matmul, norms, rows, stream
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray
from voltapile.workers.protocol import Row

from ..test_matmul import activations, random_raw
from .emulation import EmulatedOps, has_compiler
from .test_fragments import ops_of
from .test_scratch import engine_of, gpu

__all__ = ["gpu"]  # a fixture

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")
EPS = 1e-6
NORM = "rms_norm_rows"


@pytest.fixture
def ops(folder: Path) -> EmulatedOps:
    return ops_of(90, folder)


def matrix(ops: EmulatedOps, name: str, count: int, columns: int, seed: int = 3) -> CudaWeight:
    return ops.weight(random_raw(name, count, columns, seed), name, (count, columns))


def vector(ops: EmulatedOps, count: int, seed: int) -> CudaWeight:
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    return ops.weight(values.view(np.uint8), "F32", (count,))


def residual(ops: EmulatedOps, tokens: int, columns: int) -> DeviceArray:
    """Each token of another size."""
    sizes = np.logspace(-3, 2, tokens)[:, None]
    return ops.array((activations(tokens, columns) * sizes).astype(np.float32))


def names(ops: EmulatedOps) -> list[str]:
    found = [instance.function for instance, _, _ in ops.launched]
    ops.launched.clear()
    return found


@pytest.mark.parametrize(
    ("name", "columns", "tokens"),
    [
        *(("Q4_K", 768, tokens) for tokens in (1, 2, 3, 4, 5, 6, 7, 8)),
        ("Q4_K", 4352, 1),
        ("Q4_K", 4352, 2),
        ("Q5_K", 768, 1),
        ("Q5_K", 4352, 2),
        ("Q6_K", 768, 1),
        ("Q6_K", 768, 5),
        ("Q8_0", 768, 1),
        ("Q8_0", 4352, 3),
        ("Q6_K", 2304, 1),
        ("Q8_0", 2304, 1),
        ("Q8_0", 4352, 1),
        ("Q4_K", 12544, 1),
        ("Q6_K", 12544, 1),
    ],
)
def test_a_product_norms_with_the_same_bits(
    ops: EmulatedOps, name: str, columns: int, tokens: int
) -> None:
    weight, gain = matrix(ops, name, 48, columns), vector(ops, columns, 2)
    bias, x = vector(ops, 48, 4), residual(ops, tokens, columns)
    first = rows.rms_norm(ops, x, gain, EPS)
    apart = ops.to_host(matmul.linear(ops, first, weight, bias))
    assert names(ops) == [NORM, "matmul_stream"]
    normed = norms.LateNorms().norm(ops, x, gain, EPS)
    joined = ops.to_host(matmul.linear(ops, normed, weight, bias))
    assert names(ops) == ["matmul_stream"]
    np.testing.assert_array_equal(joined, apart)
    assert np.abs(apart).max() > 0
    if tokens > 1:  # and those that a row has alone
        last = norms.LateNorms().norm(ops, x[tokens - 1 :], gain, EPS)
        alone = ops.to_host(matmul.linear(ops, last, weight, bias))
        np.testing.assert_array_equal(joined[-1:], alone)


@pytest.mark.parametrize("pair", [("Q4_K", "Q6_K"), ("Q4_K", "Q8_0"), ("Q4_K", "Q5_K")])
def test_two_formats_of_a_launch(ops: EmulatedOps, pair: tuple[str, str]) -> None:
    weights = [matrix(ops, name, 48, 768) for name in (pair[0], pair[1], pair[0])]
    gain, x = vector(ops, 768, 2), residual(ops, 3, 768)
    apart = matmul.linears(ops, rows.rms_norm(ops, x, gain, EPS), weights, [None] * 3)
    names(ops)
    late = norms.LateNorms().norm(ops, x, gain, EPS)
    joined = matmul.linears(ops, late, weights, [None] * 3)
    assert names(ops) == ["matmul_stream"]
    for one, two in zip(joined, apart, strict=True):
        np.testing.assert_array_equal(ops.to_host(one), ops.to_host(two))


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_gate_and_its_up(ops: EmulatedOps, tokens: int) -> None:
    gate, up = (matrix(ops, "Q4_K", 64, 768, seed) for seed in (5, 6))
    gain, x = vector(ops, 768, 2), residual(ops, tokens, 768)
    normed = rows.rms_norm(ops, x, gain, EPS)
    apart = ops.to_host(matmul.glu(ops, normed, gate, up, "silu"))
    names(ops)
    late = norms.LateNorms().norm(ops, x, gain, EPS)
    np.testing.assert_array_equal(ops.to_host(matmul.glu(ops, late, gate, up, "silu")), apart)
    assert names(ops) == ["matmul_stream"]


def test_whoever_cannot_norm_has_it_done_before(ops: EmulatedOps) -> None:
    """Once, and everything behind it reads that."""
    gain, x = vector(ops, 768, 2), residual(ops, 2, 768)
    want = ops.to_host(rows.rms_norm(ops, x, gain, EPS))
    five, four = matrix(ops, "Q5_0", 40, 768), matrix(ops, "Q4_K", 48, 768)
    apart = ops.to_host(matmul.linear(ops, ops.array(want), five))
    names(ops)
    late = norms.LateNorms().norm(ops, x, gain, EPS)
    assert norms.late_norm(late) is late
    assert len(late) == 2
    assert late.shape == (2, 768)
    assert names(ops) == []
    np.testing.assert_array_equal(ops.to_host(matmul.linear(ops, late, five)), apart)
    matmul.linear(ops, late, four)
    assert names(ops) == [NORM, "matmul_rows", "matmul_stream"]
    assert norms.late_norm(late) is None
    np.testing.assert_array_equal(ops.to_host(late[1]), want[1])
    # many parts are normed once for all blocks
    wide, large, rest = vector(ops, 4352, 2), matrix(ops, "Q4_K", 48, 4352), residual(ops, 4, 4352)
    matmul.linear(ops, norms.LateNorms().norm(ops, rest, wide, EPS), large)
    assert names(ops) == [NORM, "matmul_stream"]
    # what is added to might be what the norm is made of
    late = norms.LateNorms().norm(ops, x, gain, EPS)
    matmul.linear(ops, late, matrix(ops, "Q4_K", 768, 768), add_to=x)
    assert names(ops) == [NORM, "matmul_stream"]
    view = norms.LateNorms().norm(ops, x, gain, EPS).reshape(-1, 128)
    assert names(ops) == [NORM]
    assert view.shape == (12, 128)


def test_which_norms_wait(ops: EmulatedOps, folder: Path) -> None:
    def is_late(ops: EmulatedOps, tokens: int, columns: int) -> bool:
        x, gain = ops.array(np.ones((tokens, columns), np.float32)), vector(ops, columns, 1)
        return norms.late_norm(norms.LateNorms().norm(ops, x, gain, EPS)) is not None

    assert is_late(ops, 1, 768)
    assert is_late(ops, stream.TOKENS, 768)
    assert is_late(ops, clusters.MOST, 768)  # which records.py norms
    assert not is_late(ops, clusters.MOST + 1, 768)
    assert not is_late(ops_of(80, folder), stream.TOKENS + 1, 768)
    assert not is_late(ops, 0, 768)
    assert not is_late(ops, 1, 512)  # of the kernel for heads
    assert not is_late(ops, 1, 1000)
    assert not is_late(ops_of(70, folder), 1, 768)
    heads, gain = ops.array(np.ones((2, 1536), np.float32)), vector(ops, 768, 1)
    assert norms.late_norm(norms.LateNorms().norm(ops, heads, gain, EPS)) is None


def test_rows_that_have_changed_are_not_normed(ops: EmulatedOps) -> None:
    gain, x = vector(ops, 768, 2), residual(ops, 4, 768)
    late = norms.LateNorms()
    one, two, done = (late.norm(ops, x[i : i + 2], gain, EPS) for i in (0, 2, 0))
    assert done.ptr
    late.change(x[1])
    assert two.ptr
    with pytest.raises(AssertionError, match="have changed"):
        _ = one.ptr
    assert done.ptr  # it was there before
    other = late.norm(ops, x, gain, EPS)
    late.forget()
    assert other.ptr


STEPS = [
    ("qwen3-8b-q4km", "", 0),
    ("qwen3-30b-a3b-q4km", "", 0),
    ("qwen3-30b-a3b-q4km", "Q8_0", 48),
]


@pytest.mark.parametrize(("model", "router", "launched"), STEPS)
def test_norms_that_a_step_launches(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, model: str, router: str, launched: int
) -> None:
    """A router norms what it reads, and another product does, but experts do not. On an sm_80 that
    is not there."""
    device = importlib.import_module("voltapile.kernels.cuda.device").Device
    arch = property(lambda self: stream.ARCH, lambda self, value: None)
    monkeypatch.setattr(device, "arch", arch, raising=False)
    engine, shapes, launch = engine_of(model, 1, "", 4), [], rows.rms_norm
    for block in engine.model.blk.values() if router else ():
        block.ffn.ffn_gate_inp.type_name = router

    def watched(ops: Any, x: DeviceArray, *rest: Any, **named: Any) -> DeviceArray:
        shapes.append(x.shape)
        return launch(ops, x, *rest, **named)

    monkeypatch.setattr(rows, "rms_norm", watched)
    engine.ops.reset_scratch()
    engine._forward(engine.buffer.fill([Row(slot=0, sample=True)]))
    assert len(shapes) == launched
