"""Matrix products on the GPU against float64 numpy: formats, shapes, numbers of tokens, bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import clusters, gemm, matmul, stream, tiles
from voltapile.kernels.cuda.chunks import CHUNKS
from voltapile.kernels.cuda.matmul import EVERY_ROW_ALONE, Policy
from voltapile.shm.formats import format_of

from ..kernels.cuda.test_fragments import tolerance
from ..kernels.test_matmul import activation_of, activations, random_raw, values_of

pytestmark = pytest.mark.gpu

SHAPES = [(1, 256), (37, 768), (130, 4096), (33, 12288), (144, 4096), (48, 12288)]
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 64, 130)
WAYS = {
    "rows": EVERY_ROW_ALONE,
    "fused": Policy(fused_from=1),
    "library": Policy(cublas_from=1),
}


@pytest.fixture(autouse=True)
def _scratch(cuda: Any) -> Iterator[None]:
    with cuda.scope():
        yield


def weight_of(cuda: Any, name: str, rows: int, cols: int, seed: int = 0) -> tuple[Any, np.ndarray]:
    raw = random_raw(name, rows, cols, seed)
    return cuda.weight(raw, name, (rows, cols)), values_of(raw, name, rows)


def linear(cuda: Any, put: Any, x: np.ndarray, weight: Any, way: Policy) -> np.ndarray:
    with cuda.scope():
        return np.asarray(cuda.to_host(matmul.linear(cuda, put(x), weight, policy=way)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CHUNKS)
def test_rows(cuda: Any, put: Any, name: str, shape: tuple[int, int]) -> None:
    weight, values = weight_of(cuda, name, *shape)
    for tokens in (1, 5, 8, 9, 33):
        x = activations(tokens, shape[1], tokens)
        got = linear(cuda, put, x, weight, EVERY_ROW_ALONE)
        error = np.abs(got - x.astype(np.float64) @ values.T)
        assert (error <= tolerance(x, values, name)).all(), tokens


@pytest.mark.parametrize("cols", [32, 96, 288, 576])
@pytest.mark.parametrize("name", [n for n in CHUNKS if format_of(n).block_len <= 32])
def test_columns_that_end_inside_a_chunk(cuda: Any, put: Any, name: str, cols: int) -> None:
    weight, values = weight_of(cuda, name, 35, cols)
    x = activations(6, cols)
    for kind, way in WAYS.items():
        error = np.abs(linear(cuda, put, x, weight, way) - x.astype(np.float64) @ values.T)
        assert (error <= tolerance(x, values, name, kind != "rows")).all(), kind


@pytest.mark.parametrize("cols", [1, 7, 31, 100])
@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_float_columns_of_any_number(cuda: Any, put: Any, name: str, cols: int) -> None:
    weight, values = weight_of(cuda, name, 9, cols)
    x = activations(6, cols)
    error = np.abs(linear(cuda, put, x, weight, WAYS["library"]) - x.astype(np.float64) @ values.T)
    assert (error <= tolerance(x, values, name)).all()


@pytest.mark.parametrize("way", ["fused", "library"])
@pytest.mark.parametrize("name", CHUNKS)
def test_many_rows(cuda: Any, put: Any, name: str, way: str) -> None:
    for rows, cols, tokens in ((208, 1024, 64), (131, 512, 130), (128, 2048, 512)):
        weight, values = weight_of(cuda, name, rows, cols)
        x = activations(tokens, cols, tokens)
        got = linear(cuda, put, x, weight, WAYS[way])
        error = np.abs(got - x.astype(np.float64) @ values.T)
        assert (error <= tolerance(x, values, name, True)).all(), (rows, cols, tokens)


@pytest.mark.parametrize("name", tiles.FORMATS)
def test_both_layouts_give_the_same_bits(cuda: Any, put: Any, name: str) -> None:
    """The first rows of a matrix that is not whole tiles are one that is."""
    rows, cols = 112, 2304
    raw = random_raw(name, rows + 8, cols)
    whole = cuda.weight(raw, name, (rows + 8, cols))
    tiled = cuda.weight(raw[: len(raw) // (rows + 8) * rows], name, (rows, cols))
    assert (whole.is_tiled, tiled.is_tiled) == (False, True)
    for tokens in (1, 5, 9, 70):
        x = activations(tokens, cols, tokens)
        for way in ("rows", "fused"):
            expected = linear(cuda, put, x, whole, WAYS[way])[:, :rows]
            np.testing.assert_array_equal(linear(cuda, put, x, tiled, WAYS[way]), expected)
    halves = [cuda.to_host(gemm.unpacked(cuda, each, 0)) for each in (whole, tiled)]
    np.testing.assert_array_equal(halves[0][:rows], halves[1])


@pytest.mark.parametrize(("rows", "other_rows"), [(67, 50), (80, 64)])
@pytest.mark.parametrize("name", CHUNKS)
def test_a_row_has_the_same_bits_in_any_company(
    cuda: Any, put: Any, name: str, rows: int, other_rows: int
) -> None:
    cols = 1536
    weight, _ = weight_of(cuda, name, rows, cols)
    other, _ = weight_of(cuda, "Q8_0", other_rows, cols)
    x = activations(130, cols)
    alone = np.concatenate(
        [linear(cuda, put, row, weight, EVERY_ROW_ALONE) for row in x[:40, None]]
    )
    for tokens in TOKENS:
        got = linear(cuda, put, x[:tokens], weight, EVERY_ROW_ALONE)
        np.testing.assert_array_equal(got[:40], alone[: min(tokens, 40)])
        outs = matmul.linears(cuda, put(x[:tokens]), (other, weight), (None, None))
        np.testing.assert_array_equal(cuda.to_host(outs[1]), got)
    mixed = linear(cuda, put, x, weight, replace(WAYS["library"], generated=8))
    np.testing.assert_array_equal(mixed[:8], alone[:8])
    again = linear(cuda, put, x, weight, replace(WAYS["library"], generated=8))
    np.testing.assert_array_equal(mixed, again)


@contextmanager
def rows_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All products by matmul_rows.cu."""
    with monkeypatch.context() as patch:
        patch.setattr(stream, "ARCH", 1000)
        patch.setattr(clusters, "ARCH", 1000)
        yield


@pytest.mark.parametrize("name", clusters.FORMATS)
def test_engines_give_the_same_bits(
    cuda: Any, put: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those for few, several and many rows against matmul_rows.cu, at sizes that fill a card; with
    the last, warps have the time to drift apart."""
    for rows, cols in ((4096, 4096), (1040, 12288), (40016, 2304)):
        weight = cuda.weight(random_raw(name, rows, cols), name, (rows, cols))
        for tokens in (1, 2, 8, 9, 17, 32, 64):
            x = activations(tokens, cols, tokens)
            got = linear(cuda, put, x, weight, EVERY_ROW_ALONE)
            with rows_alone(monkeypatch):
                plain = linear(cuda, put, x, weight, EVERY_ROW_ALONE)
            np.testing.assert_array_equal(got, plain)


@pytest.mark.parametrize("staged_from", [0, 1 << 20], ids=["records", "alone"])
@pytest.mark.parametrize("tokens", [9, 29, 50])
def test_many_rows_of_several_matrices(
    cuda: Any, put: Any, tokens: int, staged_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two formats in a launch; a gate and its up; a residual: bits as of matmul_rows.cu. Tokens
    come as records or are made by each block."""
    monkeypatch.setattr(clusters, "STAGED_FROM", staged_from)
    cols = 4096
    made = [
        weight_of(cuda, name, rows, cols, 5)[0]
        for name, rows in (("Q4_K", 4096), ("Q4_K", 4096), ("Q6_K", 1040))
    ]
    x = put(activations(tokens, cols, 8) / 1000)
    start = activations(tokens, 4096, 4)

    def run() -> list[np.ndarray]:
        with cuda.scope():
            outs = matmul.linears(cuda, x, made, [None] * 3)
            gated = matmul.glu(cuda, x, made[0], made[1], "silu")
            total = matmul.linear(cuda, x, made[0], add_to=put(start))
            return [np.asarray(cuda.to_host(out)) for out in (*outs, gated, total)]

    got = run()
    with rows_alone(monkeypatch):
        plain = run()
    for one, other in zip(got, plain, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("heights", [(70, 33), (64, 48), (64, 33)], ids=str)
@pytest.mark.parametrize("pair", sorted(matmul.PAIRS), ids=str)
def test_pairs_of_formats(
    cuda: Any, put: Any, pair: tuple[str, str], heights: tuple[int, int]
) -> None:
    x = activations(3, 768)
    made = [weight_of(cuda, name, rows, 768) for name in pair for rows in heights][:3]
    outs = matmul.linears(cuda, put(x), [weight for weight, _ in made], [None] * 3)
    for (weight, values), out in zip(made, outs, strict=True):
        error = np.abs(cuda.to_host(out) - x.astype(np.float64) @ values.T)
        assert (error <= tolerance(x, values, weight.type_name)).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("names", [("Q4_K", "Q4_K"), ("Q8_0", "Q8_0"), ("Q4_K", "Q6_K")], ids=str)
@pytest.mark.parametrize(("kind", "rows"), [("silu", 144), ("gelu_tanh", 144), ("silu", 150)])
def test_glu(cuda: Any, put: Any, kind: str, rows: int, names: tuple[str, str], way: str) -> None:
    cols, tokens = 512, 9
    (gate, gates), (up, ups) = (
        weight_of(cuda, name, rows, cols, 5 + i) for i, name in enumerate(names)
    )
    biases = np.random.default_rng(7).standard_normal((2, rows)).astype(np.float32)
    vectors = [cuda.weight(b.view(np.uint8), "F32", b.shape) for b in biases]
    x = activations(tokens, cols, 8) / 1000
    got = cuda.to_host(matmul.glu(cuda, put(x), gate, up, kind, *vectors, policy=WAYS[way]))
    g, u = (x.astype(np.float64) @ w.T + b for w, b in zip((gates, ups), biases, strict=True))
    off = [tolerance(x, w, "Q4_K", True) + 2.0**-22 * np.abs(v) for w, v in ((gates, g), (ups, u))]
    with np.errstate(over="ignore"):
        active = activation_of(kind, g)
    bound = 1.13 * off[0] * (np.abs(u) + off[1]) + np.abs(active) * off[1]
    assert (np.abs(got - active * u) <= bound + 2.0**-20 * np.abs(active * u) + 1e-7).all()


@pytest.mark.parametrize("rows", [50, 64])
@pytest.mark.parametrize("way", WAYS)
def test_bias_and_residual(cuda: Any, put: Any, way: str, rows: int) -> None:
    x, start = activations(11, 256), activations(11, rows, 4)
    weight, _ = weight_of(cuda, "Q4_K", rows, 256)
    bias = np.random.default_rng(3).standard_normal(rows).astype(np.float32)
    vector = cuda.weight(bias.view(np.uint8), "F32", bias.shape)
    plain = linear(cuda, put, x, weight, WAYS[way])
    total = put(start)
    got = matmul.linear(cuda, put(x), weight, vector, add_to=total, policy=WAYS[way])
    assert got is total
    np.testing.assert_array_equal(cuda.to_host(total), start + (plain + bias))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("outlier", [1e4, 1e10, 1e30])
@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "F16"])
@pytest.mark.parametrize("rows", [65, 80])  # whole tiles or not
def test_outliers(cuda: Any, put: Any, rows: int, name: str, outlier: float, way: str) -> None:
    weight, values = weight_of(cuda, name, rows, 512)
    x = activations(4, 512)
    x[1, 77], x[2], x[3] = outlier, 0, 1e-42
    got = linear(cuda, put, x, weight, WAYS[way])
    floor = np.abs(values).sum(-1) * 2.0**-125
    error = np.abs(got - x.astype(np.float64) @ values.T)
    assert (error <= tolerance(x, values, name, way != "rows") + floor).all()
    assert (got[2] == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [65, 80])
def test_what_is_not_finite_shows_in_its_row_alone(
    cuda: Any, put: Any, rows: int, way: str, bad: float
) -> None:
    weight, _ = weight_of(cuda, "Q4_K", rows, 512)
    x = activations(4, 512)
    clean = linear(cuda, put, x, weight, WAYS[way])
    x[1, 77] = bad
    got = linear(cuda, put, x, weight, WAYS[way])
    assert not np.isfinite(got[1]).any()
    np.testing.assert_array_equal(got[[0, 2, 3]], clean[[0, 2, 3]])
