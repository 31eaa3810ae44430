"""The product that streams, on the CPU: against float64 numpy and, in bits, the other engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from voltapile.kernels.cuda import matmul, stream, wide
from voltapile.kernels.cuda.norms import LateNorms

from ..test_matmul import activations, random_raw, values_of
from .emulation import EmulatedOps, has_compiler
from .test_fragments import ops_of, tolerance

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")
MIXED = stream.MIXED[0]
DEPTH_AT = 23  # of the kernel's arguments: a ring's places, and how many are filled at once


@pytest.fixture(autouse=True)
def _no_wide_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "FROM", 1000)
    wide.deal.cache_clear()
    stream.deal.cache_clear()


def both(
    ops: EmulatedOps, monkeypatch: pytest.MonkeyPatch, run: object, kind: object = stream
) -> tuple[np.ndarray, np.ndarray]:
    """What is streamed, and the same from matmul_rows.cu."""
    streamed = run()  # type: ignore[operator]
    assert ops.launched[-1][0] in kind.INSTANCES  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(matmul.stream, "ARCH", 1000)
        plain = run()  # type: ignore[operator]
    assert ops.launched[-1][0] not in [*stream.INSTANCES, *wide.INSTANCES]
    return streamed, plain


def glu_and_residual(ops: EmulatedOps, rows: int, tokens: int) -> list[Callable[[], np.ndarray]]:
    """Both with biases."""
    gate, up = (
        ops.weight(random_raw("Q4_K", rows, 768, seed), "Q4_K", (rows, 768)) for seed in (5, 6)
    )
    biases = np.random.default_rng(7).standard_normal((2, rows)).astype(np.float32)
    vectors = [ops.weight(b.view(np.uint8), "F32", b.shape) for b in biases]
    x = ops.array(activations(tokens, 768, 8) / 1000)
    start = activations(tokens, rows, 4)
    return [
        lambda: ops.to_host(matmul.glu(ops, x, gate, up, "silu", *vectors)),
        lambda: ops.to_host(matmul.linear(ops, x, gate, vectors[0], add_to=ops.array(start))),
    ]


@pytest.mark.parametrize(
    ("arch", "name"), [*((90, name) for name in stream.FORMATS), (80, "Q4_K"), (80, "Q6_K")]
)
def test_bits_are_those_of_rows(
    arch: int,
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops = ops_of(arch, folder)
    for rows, columns, tokens in ((160, 768, 1), (48, 512, 8), (16, 4352, 3)):
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


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("is_normed", [False, True])
def test_what_begins_late_has_the_same_bits(
    arch: int, is_normed: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rings are filled in two steps then, two places one by one."""
    ops, (rows, columns) = ops_of(arch, folder), (176, 4352)
    weight = ops.weight(random_raw("Q8_0", rows, columns), "Q8_0", (rows, columns))
    gains = np.random.default_rng(3).uniform(0.5, 2, columns).astype(np.float32)
    gain = ops.weight(gains.view(np.uint8), "F32", gains.shape)
    x, found = ops.array(activations(2, columns)), []
    monkeypatch.setattr(ops.trail, "add", lambda held: None)  # of a norm that is launched
    for held, early in ((stream.LEFT, 1000), (stream.LEFT + 1, stream.EARLY)):
        monkeypatch.setattr(ops.trail, "held", held)
        read = LateNorms().norm(ops, x, gain, 1e-6) if is_normed else x
        found.append(ops.to_host(matmul.linear(ops, read, weight)))
        depth, places = (int(each) for each in ops.arguments[-1][DEPTH_AT : DEPTH_AT + 2])
        assert (depth, places) == (stream.DEPTH, min(early, depth))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("arch", [80, 90])
def test_a_deeper_ring_has_the_same_bits(
    arch: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, key = ops_of(arch, folder), (("Q8_0", "Q8_0"), stream.TEAMS)
    instance = stream.STREAM[key]
    weight = ops.weight(random_raw("Q8_0", 176, 4352), "Q8_0", (176, 4352))
    x = ops.array(activations(2, 4352))
    plain = ops.to_host(matmul.linear(ops, x, weight))
    deeper = tuple((key, "3" if key == "DEPTH" else value) for key, value in instance.defines)
    monkeypatch.setitem(stream.STREAM, key, replace(instance, defines=deeper))
    monkeypatch.setattr(stream, "DEPTH", 3)
    stream.deal.cache_clear()
    got = ops.to_host(matmul.linear(ops, x, weight))
    stream.deal.cache_clear()
    assert [each[0] for each in ops.launched] == [instance, replace(instance, defines=deeper)]
    np.testing.assert_array_equal(got, plain)


@pytest.mark.parametrize("name", stream.FORMATS)
def test_one_broad_team_has_the_same_bits(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = ops_of(90, folder)
    for rows, columns, tokens in ((48, 4096, 1), (64, 2304, 3), (16, 3072, 8)):
        weight = ops.weight(random_raw(name, rows, columns), name, (rows, columns))
        x, start = ops.array(activations(tokens, columns)), activations(tokens, rows, 4)
        got, plain = both(
            ops,
            monkeypatch,
            lambda x=x, w=weight, s=start: ops.to_host(
                matmul.linear(ops, x, w, None, ops.array(s))
            ),
        )
        np.testing.assert_array_equal(got, plain)
        known = stream.BROAD[name, name]
        kind = stream.ALONE[known] if tokens == 1 else known
        assert [each[0] for each in ops.launched].count(kind) == 1
        ops.launched.clear()


def test_where_one_broad_team_is_better() -> None:
    def warps(rows: int, columns: int) -> int:
        pair = "Q4_K", "Q4_K"
        found = stream.deal(stream.Task(pair, columns, 1, (rows,), (), False, 132, 227 << 10))
        assert found is not None
        return found.warps

    assert [warps(rows, 4096) for rows in (2048, 132 * 16, 133 * 16)] == [16, 16, 8]
    assert [warps(rows, 4096) for rows in (4096, 6144, 12288)] == [8, 16, 8]
    assert [warps(2048, columns) for columns in (2048, 2304, 4096, 4352)] == [8, 16, 16, 8]


@pytest.mark.parametrize(("pair", "teams"), [*((pair, 2) for pair in stream.MIXED), (MIXED, 1)])
def test_two_formats_share_a_launch(
    pair: tuple[str, str],
    teams: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops = ops_of(90, folder)
    if teams == 1:
        monkeypatch.setattr(matmul, "max_shared", lambda arch: 99 << 10)
    x = activations(2, 768)
    names, counts = (pair[0], pair[1], pair[0]), (80, 48, 208)
    raws = [random_raw(name, rows, 768) for name, rows in zip(names, counts, strict=True)]
    weights = [
        ops.weight(raw, name, (rows, 768))
        for raw, name, rows in zip(raws, names, counts, strict=True)
    ]
    outs = matmul.linears(ops, ops.array(x), weights, [None] * 3)
    assert [each[0] for each in ops.launched] == [stream.STREAM[pair, teams]]
    for raw, name, out in zip(raws, names, outs, strict=True):
        got = ops.to_host(out)
        values = values_of(raw, name, got.shape[1])
        error = np.abs(got - x.astype(np.float64) @ values.T)
        assert (error <= tolerance(x, values, name)).all()


@pytest.mark.parametrize("tokens", [1, 3])
def test_glu_bias_and_residual(tokens: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ops_of(90, folder)
    for run in glu_and_residual(ops, 176, tokens):
        np.testing.assert_array_equal(*both(ops, monkeypatch, run))


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_bias_is_its_own_matrix_s(
    tokens: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = ops_of(90, folder)
    raws = [random_raw("Q4_K", 128, 512, seed) for seed in (1, 2, 3)]
    weights = [ops.weight(raw, "Q4_K", (128, 512)) for raw in raws]
    bias = ops.weight(np.arange(128, dtype=np.float32).view(np.uint8), "F32", (128,))
    x = ops.array(activations(tokens, 512))

    def run() -> np.ndarray:
        outs = matmul.linears(ops, x, weights, [bias, None, bias])
        return np.stack([ops.to_host(out) for out in outs])

    np.testing.assert_array_equal(*both(ops, monkeypatch, run))


def test_what_does_not_fit_is_left_to_rows() -> None:
    def deal(name: str, columns: int, tokens: int, rows: int) -> stream.Deal | None:
        card = False, 132, 227 << 10
        return stream.deal(stream.Task((name, name), columns, tokens, (rows,), (), *card))

    assert deal("Q4_K", 4096, 1, 4096).blocks == 132
    assert deal("Q4_K", 4096, 1, 1600).blocks == 100
    assert deal("F16", 4096, 1, 4096) is None
    assert deal("Q4_K", 4096, 9, 4096) is None
    assert deal("Q8_0", 288, 1, 4096) is None
    assert deal("Q4_K", 4096, 1, 4088) is None
    assert deal("Q4_K", 65536, 8, 4096) is None


def test_what_lies_row_by_row_is_left_to_rows(folder: Path) -> None:
    ops = ops_of(90, folder)
    ops.tiles = False
    weight = ops.weight(random_raw("Q4_K", 16, 512), "Q4_K", (16, 512))
    matmul.linear(ops, ops.array(activations(1, 512)), weight)
    assert ops.launched[-1][0] in matmul.ROWS.values()


def test_what_is_no_whole_tiles_keeps_no_other_from_streaming(folder: Path) -> None:
    ops = ops_of(90, folder)
    weights = [ops.weight(random_raw("Q4_K", n, 512), "Q4_K", (n, 512)) for n in (16, 24, 16)]
    matmul.linears(ops, ops.array(activations(1, 512)), weights, [None] * 3)
    kinds = [instance in matmul.ROWS.values() for instance, _, _ in ops.launched]
    assert kinds == [False, True]


def test_rings_are_as_deep_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def depth(name: str, tokens: int) -> int:
        task = stream.Task((name, name), 4096, tokens, (4096,), (), False, 132, 227 << 10)
        found = stream.deal(task)
        assert found is not None
        assert found.shared <= 227 << 10
        return found.depth

    monkeypatch.setattr(stream, "DEPTH", 4)
    stream.deal.cache_clear()
    assert [depth("Q4_K", tokens) for tokens in (1, 4, 8)] == [4, 4, 3]
    assert [depth(name, 1) for name in ("Q5_K", "Q6_K", "Q8_0")] == [4, 4, 3]
    stream.deal.cache_clear()


def test_two_formats_are_dealt_by_their_bytes() -> None:
    def first(rows: int, other_rows: int) -> int:
        pair, others = ("Q4_K", "Q6_K"), (other_rows,) if other_rows else ()
        found = stream.deal(stream.Task(pair, 4096, 1, (rows,), others, False, 132, 227 << 10))
        assert found is not None
        return found.first_other

    assert first(4096, 0) == 132
    assert 40 < first(4096, 4096) < 66
    assert first(5120, 1024) <= 100  # each team of the other format has one tile


def test_blocks_of_one_team_where_two_do_not_fit() -> None:
    def teams(pair: tuple[str, str], tokens: int, most: int) -> tuple[int, int] | None:
        task = stream.Task(pair, 4096, tokens, (4096,), (4096,), False, 132, most)
        found = stream.deal(task)
        return None if found is None else (found.teams, found.blocks)

    assert teams(MIXED, 1, 227 << 10) == (2, 132)
    assert teams(MIXED, 1, 99 << 10) == (1, 132)
    assert teams(("Q6_K", "Q6_K"), 1, 99 << 10) is None
