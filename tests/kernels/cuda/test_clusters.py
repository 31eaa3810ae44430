"""The product of many generated rows, on the CPU: against float64 numpy; bits as of matmul_rows.cu.

Clusters have blocks of few warps here, so that all threads of one fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from voltapile.kernels.cuda import clusters, matmul, stream

from ..test_matmul import activations, random_raw, values_of
from .emulation import has_compiler
from .test_fragments import folder, ops_of, tolerance  # noqa: F401  a fixture

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(clusters, "CREW", 2)
    monkeypatch.setattr(clusters, "CLUSTER", clusters.instances())
    monkeypatch.setattr(clusters, "FROM", 1)
    monkeypatch.setattr(stream, "TOKENS", 0)
    stream.deal.cache_clear()
    clusters.deal.cache_clear()
    yield
    stream.deal.cache_clear()
    clusters.deal.cache_clear()


def both(ops: object, monkeypatch: pytest.MonkeyPatch, run: object) -> tuple[np.ndarray, ...]:
    """What clusters made, and the same from matmul_rows.cu."""
    got = run()  # type: ignore[operator]
    assert ops.launched[-1][0] in clusters.CLUSTER.values()  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(clusters, "ARCH", 1000)
        patch.setattr(stream, "ARCH", 1000)
        return got, run()  # type: ignore[operator]


@pytest.mark.parametrize("name", clusters.FORMATS)
def test_bits_are_those_of_rows(
    name: str,
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops = ops_of(90, folder)
    # Of these, the first has classes without columns, the second four rounds of tiles.
    for rows, columns, tokens in ((60, 768, 19), (250, 2304, 11)):
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
