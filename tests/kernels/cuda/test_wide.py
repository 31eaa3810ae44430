"""The product of several rows, on the CPU: against float64 numpy; bits as of the other engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from voltapile.kernels.cuda import clusters, matmul, stream, wide
from voltapile.kernels.cuda.compile import CSRC

from ..test_matmul import activations, random_raw, values_of
from .emulation import has_compiler
from .test_fragments import ops_of, tolerance
from .test_stream import both, glu_and_residual

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")


@pytest.fixture(autouse=True)
def _clean_deals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows, too, for what else is streamed; many, for what else clusters take."""
    monkeypatch.setattr(stream, "TOKENS", 1)
    monkeypatch.setattr(clusters, "ARCH", 1000)
    stream.deal.cache_clear()
    wide.deal.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", wide.FORMATS)
def test_bits_are_those_of_rows(
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops = ops_of(90, folder)
    for rows, columns, tokens in ((304, 512, 3), (48, 2304, 19), (32, 4352, 8)):
        raw, x = random_raw(name, rows, columns), activations(tokens, columns)
        weight = ops.weight(raw, name, (rows, columns))
        array = ops.array(x)
        got, plain = both(
            ops, monkeypatch, lambda a=array, w=weight: ops.to_host(matmul.linear(ops, a, w)), wide
        )
        np.testing.assert_array_equal(got, plain)
        values = values_of(raw, name, rows)
        error = np.abs(got - x.astype(np.float64) @ values.T)
        assert (error <= tolerance(x, values, name)).all()
        alone = ops.to_host(matmul.linear(ops, ops.array(x[-1:]), weight))
        np.testing.assert_array_equal(alone[0], got[-1])


@pytest.mark.parametrize("pair", wide.MIXED)
def test_two_formats_share_a_launch(
    pair: tuple[str, str],
    folder: Path,
) -> None:
    ops = ops_of(90, folder)
    x = activations(2, 768)
    names, counts = (pair[0], pair[1], pair[0]), (80, 48, 400)
    raws = [random_raw(name, rows, 768) for name, rows in zip(names, counts, strict=True)]
    weights = [
        ops.weight(raw, name, (rows, 768))
        for raw, name, rows in zip(raws, names, counts, strict=True)
    ]
    outs = matmul.linears(ops, ops.array(x), weights, [None] * 3)
    assert ops.launched[-1][0] == wide.WIDE[pair, 0]
    for raw, name, out in zip(raws, names, outs, strict=True):
        got = ops.to_host(out)
        values = values_of(raw, name, got.shape[1])
        error = np.abs(got - x.astype(np.float64) @ values.T)
        assert (error <= tolerance(x, values, name)).all()


def test_glu_bias_and_residual(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops = ops_of(90, folder)
    for run in glu_and_residual(ops, 256, 9):
        np.testing.assert_array_equal(*both(ops, monkeypatch, run, wide))


def test_what_a_block_asked_for_itself_is_awaited_as_its_own() -> None:
    """Waiting for another block's copies would empty the first cache at each chunk."""
    source = (CSRC / "matmul_wide.cu").read_text()
    assert "await_own(" in source
    assert " await(" not in source


def test_tokens_are_dealt_evenly() -> None:
    def deal(tokens: int, columns: int = 4096) -> wide.Deal | None:
        card = False, 132, 227 << 10
        return wide.deal(stream.Task(("Q4_K", "Q4_K"), columns, tokens, (4096,), (), *card))

    assert deal(1) is None
    assert deal(2, 100) is None
    assert (deal(16).room, deal(16).blocks) == (16, 132)
    assert (deal(17).room, deal(17).blocks) == (9, 66)
    assert (deal(33, 12288).room, deal(33, 12288).blocks) == (11, 44)
    assert deal(2).blocks == 256
