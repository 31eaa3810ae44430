"""The product of many generated rows, on the CPU: against float64 numpy; bits as of matmul_rows.cu.

Clusters have blocks of few warps here, so that all threads of one fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from voltapile.kernels.cuda import clusters, matmul, norms, stream
from voltapile.kernels.cuda.rows import rms_norm

from ..test_matmul import activations, random_raw, values_of
from .emulation import has_compiler
from .test_fragments import ops_of, tolerance
from .test_norms import EPS, names, residual, vector
from .test_stream import glu_and_residual

CREWS = clusters.CREWS
pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(clusters, "CREWS", (8,))
    monkeypatch.setattr(clusters, "CLUSTER", clusters.instances())
    monkeypatch.setattr(clusters, "FROM", 1)
    monkeypatch.setattr(stream, "TOKENS", 0)
    stream.deal.cache_clear()
    clusters.deal.cache_clear()
    yield
    stream.deal.cache_clear()
    clusters.deal.cache_clear()


@pytest.fixture(params=[0, 1 << 20], ids=["records", "alone"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where on tokens come as records."""
    monkeypatch.setattr(clusters, "STAGED_FROM", request.param)


def both(ops: object, monkeypatch: pytest.MonkeyPatch, run: object) -> tuple[np.ndarray, ...]:
    """What clusters made, and the same from matmul_rows.cu."""
    got = run()  # type: ignore[operator]
    assert ops.launched[-1][0] in clusters.CLUSTER.values()  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(clusters, "ARCH", 1000)
        patch.setattr(stream, "ARCH", 1000)
        return got, run()  # type: ignore[operator]


@pytest.mark.usefixtures("_way")
@pytest.mark.slow
@pytest.mark.parametrize("name", clusters.FORMATS)
def test_bits_are_those_of_rows(
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops = ops_of(90, folder)
    # The first has classes without columns; of the second a cluster has ten or eleven tiles for
    # eight warps, so that these share the last; of the third six or seven, and no warp shares any.
    for rows, columns, tokens in ((64, 768, 19), (336, 2304, 11), (208, 4352, 9)):
        raw, x = random_raw(name, rows, columns), activations(tokens, columns)
        weight = ops.weight(raw, name, (rows, columns))
        array = ops.array(x)
        got, plain = both(
            ops, monkeypatch, lambda a=array, w=weight: ops.to_host(matmul.linear(ops, a, w))
        )
        np.testing.assert_array_equal(got, plain)
        values = values_of(raw, name, rows)
        error = np.abs(got - x.astype(np.float64) @ values.T)
        assert (error <= tolerance(x, values, name)).all()


@pytest.mark.slow
@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("boxes", [1, 2])
def test_sums_wait_for_their_readers(
    boxes: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clusters, "MEMORY", [(boxes, 1)])
    ops = ops_of(90, folder)
    rows, columns, tokens = 512, 2304, 3
    raw, x = random_raw("Q8_0", rows, columns), activations(tokens, columns)
    weight = ops.weight(raw, "Q8_0", (rows, columns))
    array = ops.array(x)
    got = both(ops, monkeypatch, lambda: ops.to_host(matmul.linear(ops, array, weight)))
    np.testing.assert_array_equal(*got)


@pytest.mark.usefixtures("_way")
@pytest.mark.slow
def test_warps_may_drift_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rounds, and a tile that two warps share at the end."""
    ops = ops_of(90, folder)
    raw, x = random_raw("Q8_0", 672, 2304), activations(3, 2304)
    weight = ops.weight(raw, "Q8_0", (672, 2304))
    array = ops.array(x)
    got = both(ops, monkeypatch, lambda: ops.to_host(matmul.linear(ops, array, weight)))
    np.testing.assert_array_equal(*got)


@pytest.mark.slow
@pytest.mark.usefixtures("_way")
def test_more_rows_than_a_turn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ops_of(90, folder)
    raw, x = random_raw("Q4_K", 112, 512), activations(37, 512)
    weight = ops.weight(raw, "Q4_K", (112, 512))
    array = ops.array(x)
    got = both(ops, monkeypatch, lambda: ops.to_host(matmul.linear(ops, array, weight)))
    np.testing.assert_array_equal(*got)


@pytest.mark.usefixtures("_way")
@pytest.mark.slow
def test_two_formats_share_a_launch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ops_of(90, folder)
    x = ops.array(activations(10, 768))
    weights = [
        ops.weight(random_raw(name, rows, 768), name, (rows, 768))
        for name, rows in (("Q4_K", 80), ("Q6_K", 48), ("Q4_K", 208))
    ]

    def run() -> np.ndarray:
        outs = matmul.linears(ops, x, weights, [None] * 3)
        return np.concatenate([ops.to_host(out) for out in outs], axis=1)

    np.testing.assert_array_equal(*both(ops, monkeypatch, run))


@pytest.mark.usefixtures("_way")
def test_glu_bias_and_residual(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ops_of(90, folder)
    for run in glu_and_residual(ops, 256, 9):
        np.testing.assert_array_equal(*both(ops, monkeypatch, run))


def test_deals_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "CREWS", CREWS)
    monkeypatch.setattr(clusters, "FROM", 9)

    def deal(name: str, columns: int, tokens: int, rows: int = 4096) -> clusters.Deal | None:
        card = False, 132, 227 << 10
        return clusters.deal(stream.Task((name, name), columns, tokens, (rows,), (), *card))

    assert deal("F16", 4096, 16) is None
    assert deal("Q4_K", 4000, 16) is None
    assert deal("Q4_K", 4096, 8) is None
    for name in clusters.FORMATS:
        for columns in (1024, 4096, 12288, 17408, 25600):
            for tokens in (9, 16, 32, 33, 64):
                found = deal(name, columns, tokens)
                assert found is not None
                assert found.shared <= 227 << 10
                assert 8 * found.passes >= found.room
    # 18 tiles of a cluster, in one round, which needs no second box; many, whose last are shared;
    # more chunks of tokens, beside which rings of those 18 have room.
    one, many = deal("Q4_K", 4096, 32), deal("Q4_K", 4096, 32, 24576)
    assert one is not None
    assert (one.crew, one.boxes) == (20, 1)
    assert many is not None
    assert (many.crew, many.boxes, many.depth) == (20, 2, 2)
    down = deal("Q4_K", 12288, 32)
    assert down is not None
    assert (down.crew, down.boxes, down.depth) == (20, 1, 2)


def test_what_lies_row_by_row_is_left_to_others(folder: Path) -> None:
    ops = ops_of(90, folder)
    ops.tiles = False
    weight = ops.weight(random_raw("Q4_K", 64, 512), "Q4_K", (64, 512))
    matmul.linear(ops, ops.array(activations(9, 512)), weight)
    assert ops.launched[-1][0] in matmul.ROWS.values()


@pytest.mark.slow
def test_rows_that_nobody_else_reads_are_not_written(folder: Path) -> None:
    ops, columns = ops_of(90, folder), 768
    gain, x = vector(ops, columns, 2), residual(ops, 11, columns)
    launched = rms_norm(ops, x, gain, EPS)
    one, other = (
        ops.weight(random_raw(name, 64, columns), name, (64, columns)) for name in ("Q6_K", "Q8_0")
    )
    expected = [ops.to_host(matmul.linear(ops, launched, each)) for each in (one, other)]
    late = norms.LateNorms().norm(ops, x, gain, EPS)
    names(ops)
    np.testing.assert_array_equal(ops.to_host(matmul.linear(ops, late, one)), expected[0])
    assert names(ops) == ["norm_tokens", "matmul_cluster"]
    assert norms.late_norm(late) is not None
    found = matmul.linears(ops, late, (one, other), (None, None))  # two launches
    assert names(ops) == ["norm_tokens", "matmul_cluster", "matmul_cluster"]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ops.to_host(ours), theirs)
    np.testing.assert_array_equal(ops.to_host(late), ops.to_host(launched))
