"""Matrix kernels on the CPU: their own source through emulate.h, against float64 numpy.

It proves the order of unpacking, the permutation of columns, the register maps of the three tensor
cores, the sizes of shared memory and the deals of launches; not the machine code, its truncating
accumulator or its timing. `slow` runs every format on every architecture.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from voltapile.kernels.cuda import matmul, tiles
from voltapile.kernels.cuda.chunks import CHUNKS, max_shared
from voltapile.kernels.cuda.compile import source_of
from voltapile.kernels.cuda.matmul import Policy
from voltapile.shm.formats import format_of

from ..test_matmul import activation_of, activations, random_raw, values_of
from .emulation import HEADER, EmulatedOps, compiled, has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")

ARCHS = (70, 75, 80)
FEW = [("Q4_K", 70), ("Q6_K", 70), ("Q8_0", 70), ("F16", 70), ("Q4_K", 80), ("Q6_K", 75)]
ALL = [(name, arch) for arch in ARCHS for name in CHUNKS]
FLOATS = ("F32", "F16", "BF16")
# Bits of an activation against the largest of so many columns (EXACT_BITS, OF_GROUPS).
GRIDS = {"Q4_K": [(14, 256)], "Q5_K": [(13, 256)], "Q8_0": [(12, 32), (27, 256)]}


def ops_of(arch: int, folder: Path) -> EmulatedOps:
    return EmulatedOps(arch, folder, max_shared(arch))


def largest_of_runs(x: np.ndarray, run: int) -> np.ndarray:
    """One number for each run of columns, the last of which may be shorter."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % run)))
    return np.asarray(padded.reshape(len(x), -1, run).max(2))


def grid_error(x: np.ndarray, weights: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Of activations that are off by 2^-bits of their run's largest at most, each in its own
    direction: evenly spread they are off by 0.58 of that, so 4 times are seven deviations."""
    padded = np.pad(weights, ((0, 0), (0, -weights.shape[1] % run)))
    squares = np.square(padded).reshape(len(weights), -1, run).sum(2)
    off = 2.0**-bits * largest_of_runs(x, run)
    return np.asarray(4 * np.sqrt(np.square(off) @ squares.T))


def tolerance(x: np.ndarray, weights: np.ndarray, name: str, is_many: bool = False) -> np.ndarray:
    """An activation is off by 2^-11 of itself, or 2^-39 of its row's largest; a weight as a half,
    which those of Q6_K always are, by as much again; sums in float32 by 2^-24 for each of at most
    64 + K / 32 roundings. What is not quantised keeps two halves: 2^-21. Where sums of groups are
    exact (csrc/matmul_order.cuh) an activation may be off by 2^-bits of its run's largest, too.
    """
    x = np.abs(x.astype(np.float64))
    size = x @ np.abs(weights).T
    half = 2.0**-21 if name in FLOATS else 2.0**-11 * (2 if is_many or name == "Q6_K" else 1)
    floor = x.max(1, keepdims=True) * np.abs(weights).sum(1) * 2.0**-39
    tiny = x.sum(1, keepdims=True) * 2.0**-25 if is_many else 0  # denormal halves of weights
    off = size * (half + (64 + x.shape[1] / 32) * 2.0**-24) + floor + tiny + 1e-37
    for bits, run in () if is_many else GRIDS.get(name, ()):
        off += grid_error(x, weights, bits, run)
    return off


def product(
    ops: EmulatedOps, raw: np.ndarray, name: str, rows: int, x: np.ndarray, policy: Policy
) -> np.ndarray:
    weight = ops.weight(raw, name, (rows, x.shape[1]))
    return ops.to_host(matmul.linear(ops, ops.array(x), weight, policy=policy))


def check(name: str, arch: int, folder: Path) -> None:
    ops = ops_of(arch, folder)
    odd = 288 if 288 % format_of(name).block_len == 0 else 512
    for rows, cols, tokens in ((37, 768, 1), (33, odd, 9)):
        raw, x = random_raw(name, rows, cols), activations(tokens, cols)
        weights = values_of(raw, name, rows)
        want = x.astype(np.float64) @ weights.T
        got = product(ops, raw, name, rows, x, matmul.EVERY_ROW_ALONE)
        assert (np.abs(got - want) <= tolerance(x, weights, name)).all(), (rows, cols, tokens)


@pytest.mark.parametrize(("name", "arch"), FEW)
def test_some_formats(name: str, arch: int, folder: Path) -> None:
    check(name, arch, folder)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch"), ALL)
def test_every_format(name: str, arch: int, folder: Path) -> None:
    check(name, arch, folder)


def both_layouts(name: str, arch: int, folder: Path, tokens: Sequence[int]) -> None:
    """By tiles and row by row, with the same bits."""
    rows, columns = 48, 1280
    raw = random_raw(name, rows, columns)
    weights = values_of(raw, name, rows)
    ops = ops_of(arch, folder)
    found = []
    for ops.tiles in (True, False):
        weight = ops.weight(raw, name, (rows, columns))
        assert weight.is_tiled == ops.tiles
        for count in tokens:
            x = activations(count, columns)
            made = ops.to_host(matmul.linear(ops, ops.array(x), weight))
            error = np.abs(made - x.astype(np.float64) @ weights.T)
            assert (error <= tolerance(x, weights, name)).all()
            found.append(made)
    for one, other in zip(found, found[len(tokens) :], strict=False):
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel streams."""
    monkeypatch.setattr(matmul.stream, "ARCH", 1000)
    monkeypatch.setattr(matmul.clusters, "ARCH", 1000)


@pytest.mark.usefixtures("general")
@pytest.mark.parametrize(("name", "arch"), [("Q4_K", 70), ("Q6_K", 75), ("Q8_0", 80)])
def test_both_layouts(name: str, arch: int, folder: Path) -> None:
    both_layouts(name, arch, folder, (3,))


def test_a_gate_and_its_up_may_lie_otherwise(folder: Path) -> None:
    ops, (rows, columns) = ops_of(70, folder), (48, 512)
    raws = [random_raw("Q4_K", rows, columns, seed) for seed in (5, 6)]
    x, found = ops.array(activations(3, columns) / 1000), []
    for layouts in ((True, True), (False, False), (True, False)):
        weights = []
        for raw, ops.tiles in zip(raws, layouts, strict=True):
            weights.append(ops.weight(raw, "Q4_K", (rows, columns)))
        found.append(ops.to_host(matmul.glu(ops, x, *weights, "silu")))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.slow
@pytest.mark.usefixtures("general")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", tiles.FORMATS)
def test_both_layouts_of_every_format(name: str, arch: int, folder: Path) -> None:
    both_layouts(name, arch, folder, (1, 9))


def many_rows(name: str, arch: int, folder: Path) -> None:
    ops = ops_of(arch, folder)
    x = activations(70, 512)
    for rows in (150, 144):  # whole tiles or not
        raw = random_raw(name, rows, 512)
        weights = values_of(raw, name, rows)
        want = x.astype(np.float64) @ weights.T
        for policy in (Policy(fused_from=1), Policy(generated=3, cublas_from=1)):
            got = product(ops, raw, name, rows, x, policy)
            assert (np.abs(got - want) <= tolerance(x, weights, name, True)).all(), policy


@pytest.mark.parametrize(("name", "arch"), [("Q4_K", 70), ("Q6_K", 80)])
def test_many_rows_of_some_formats(name: str, arch: int, folder: Path) -> None:
    many_rows(name, arch, folder)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch"), ALL)
def test_many_rows_of_every_format(name: str, arch: int, folder: Path) -> None:
    many_rows(name, arch, folder)


@pytest.mark.parametrize("arch", [70, 80])
def test_a_row_has_the_same_bits_in_any_company(arch: int, folder: Path) -> None:
    ops = ops_of(arch, folder)
    raw, x = random_raw("Q4_K", 35, 768), activations(19, 768)
    weight = ops.weight(raw, "Q4_K", (35, 768))
    other = ops.weight(random_raw("Q6_K", 20, 768), "Q6_K", (20, 768))
    alone = np.concatenate(
        [ops.to_host(matmul.linear(ops, ops.array(row), weight)) for row in x[:, None]]
    )
    for tokens in (2, 3, 5, 8, 9, 19):
        some = ops.array(x[-tokens:])
        np.testing.assert_array_equal(
            ops.to_host(matmul.linear(ops, some, weight)), alone[-tokens:]
        )
        beside = matmul.linears(ops, some, (other, weight, weight), (None, None, None))
        np.testing.assert_array_equal(ops.to_host(beside[1]), alone[-tokens:])
        np.testing.assert_array_equal(ops.to_host(beside[2]), alone[-tokens:])
    generated = Policy(generated=5, cublas_from=1)
    mixed = ops.to_host(matmul.linear(ops, ops.array(x), weight, policy=generated))
    np.testing.assert_array_equal(mixed[:5], alone[:5])


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e29])
@pytest.mark.parametrize(
    ("name", "columns"), [("Q4_K", 4352), ("Q5_K", 4352), ("Q8_0", 4352), ("Q8_0", 288)]
)
def test_a_token_that_is_alone_has_the_bits_of_one_in_company(
    name: str, columns: int, size: float, folder: Path
) -> None:
    ops = ops_of(80, folder)
    raw, x = random_raw(name, 48, columns), activations(4, columns)
    x[1, 200] = 5e3  # an outlier
    x[1, 256:512] = 0
    x[0] *= np.repeat(np.float32(2.0) ** -np.arange(columns // 32), 32)  # groups of every size
    x[2, 77], x[3, -20] = np.inf, np.nan
    x *= np.float32(size)
    weight = ops.weight(raw, name, (48, columns))
    together = ops.to_host(matmul.linear(ops, ops.array(x), weight))
    for row, got in zip(x[:, None], together, strict=True):
        alone = ops.to_host(matmul.linear(ops, ops.array(row), weight))
        np.testing.assert_array_equal(alone[0], got)
    assert np.isfinite(together[:2]).all()
    assert not np.isfinite(together[2:]).any()


@pytest.mark.parametrize("rows", [333, 336])
def test_a_block_takes_several_tiles(
    rows: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "FEW_ROWS", 100)
    ops = ops_of(70, folder)
    raw, x = random_raw("Q4_K", rows, 2304), activations(3, 2304)
    got = product(ops, raw, "Q4_K", rows, x, matmul.EVERY_ROW_ALONE)
    assert ops.launched[-1][1] == (2 * ops.multiprocessors, 1)
    weights = values_of(raw, "Q4_K", rows)
    error = np.abs(got - x.astype(np.float64) @ weights.T)
    assert (error <= tolerance(x, weights, "Q4_K")).all()
    few = product(ops, raw[: len(raw) // rows * 40], "Q4_K", 40, x[1:2], matmul.EVERY_ROW_ALONE)
    assert ops.launched[-1][1] != (2 * ops.multiprocessors, 1)
    np.testing.assert_array_equal(few[0], got[1, :40])


def test_matrices_of_two_formats_share_a_launch(folder: Path) -> None:
    ops = ops_of(75, folder)
    x = activations(3, 768)
    names = ("Q4_K", "Q4_K", "Q6_K")
    shapes = [(rows, 768) for rows in (64, 48, 32)]
    raws = [random_raw(name, *shape) for name, shape in zip(names, shapes, strict=True)]
    weights = [ops.weight(*each) for each in zip(raws, names, shapes, strict=True)]
    outs = matmul.linears(ops, ops.array(x), weights, [None] * 3)
    assert len(ops.launched) == 1
    for raw, name, out in zip(raws, names, outs, strict=True):
        got = ops.to_host(out)
        values = values_of(raw, name, got.shape[1])
        error = np.abs(got - x.astype(np.float64) @ values.T)
        assert (error <= tolerance(x, values, name)).all()


@pytest.mark.parametrize("policy", [Policy(), Policy(cublas_from=1)], ids=["rows", "library"])
@pytest.mark.parametrize("up_name", ["Q4_K", "Q6_K"])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_glu(kind: str, up_name: str, policy: Policy, folder: Path) -> None:
    ops = ops_of(80, folder)
    rows, cols, tokens = 37, 256, 5
    gate, up = random_raw("Q4_K", rows, cols, 5), random_raw(up_name, rows, cols, 6)
    biases = np.random.default_rng(7).standard_normal((2, rows)).astype(np.float32)
    x = activations(tokens, cols, 8) / 1000
    vectors = [ops.weight(b.view(np.uint8), "F32", b.shape) for b in biases]
    got = ops.to_host(
        matmul.glu(
            ops, ops.array(x), ops.weight(gate, "Q4_K", (rows, cols)),
            ops.weight(up, up_name, (rows, cols)), kind, *vectors, policy=policy,
        )
    )  # fmt: skip
    gates, ups = values_of(gate, "Q4_K", rows), values_of(up, up_name, rows)
    g, u = (x.astype(np.float64) @ w.T + b for w, b in zip((gates, ups), biases, strict=True))
    off = [tolerance(x, w, "Q4_K", True) + 2.0**-22 * np.abs(v) for w, v in ((gates, g), (ups, u))]
    with np.errstate(over="ignore"):
        active = activation_of(kind, g)
    bound = 1.13 * off[0] * (np.abs(u) + off[1]) + np.abs(active) * off[1]
    assert (np.abs(got - active * u) <= bound + 2.0**-20 * np.abs(active * u) + 1e-7).all()


def test_bias_and_residual(folder: Path) -> None:
    ops = ops_of(80, folder)
    raw, x = random_raw("Q4_K", 50, 256), activations(11, 256)
    rng = np.random.default_rng(3)
    bias, start = rng.standard_normal(50).astype(np.float32), activations(11, 50, 4)
    weight = ops.weight(raw, "Q4_K", (50, 256))
    vector = ops.weight(bias.view(np.uint8), "F32", bias.shape)
    plain = ops.to_host(matmul.linear(ops, ops.array(x), weight))
    total = ops.array(start)
    assert matmul.linear(ops, ops.array(x), weight, vector, add_to=total) is total
    np.testing.assert_array_equal(ops.to_host(total), start + (plain + bias))


@pytest.mark.parametrize("policy", [Policy(), Policy(cublas_from=1)], ids=["rows", "library"])
@pytest.mark.parametrize("outlier", [300, 1e4, 1e10, 1e30])
@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "Q8_0"])
def test_outliers(name: str, outlier: float, policy: Policy, folder: Path) -> None:
    ops = ops_of(80, folder)
    raw, x = random_raw(name, 65, 512), activations(4, 512)
    weights = values_of(raw, name, 65)
    x[1, 77] = outlier
    x[2] = 0
    x[3] = 1e-42
    got = product(ops, raw, name, 65, x, policy)
    error = np.abs(got - x.astype(np.float64) @ weights.T)
    # a row is never scaled as if its largest value were below 2^-100
    floor = np.abs(weights).sum(-1) * 2.0**-125
    assert (error <= tolerance(x, weights, name, policy.cublas_from == 1) + floor).all()
    assert (got[2] == 0).all()


@pytest.mark.parametrize("outlier", [3e3, 1e30])
def test_an_outlier_takes_bits_of_its_group_alone(outlier: float, folder: Path) -> None:
    """In Q8_0: its neighbours keep 12 bits up to 2^15 below it."""
    ops = ops_of(80, folder)
    raw, x = random_raw("Q8_0", 48, 512), activations(2, 512)
    x *= np.float32(outlier * 2.0**-14) / np.abs(x).max(1, keepdims=True)
    x[1] = x[0]
    x[1, 77] = outlier
    raw = raw.reshape(48, 16, 34)
    raw[:, 2, 2:] = 0  # its group's weights
    weights = values_of(raw.reshape(-1), "Q8_0", 48)
    got = product(ops, raw.reshape(-1), "Q8_0", 48, x, matmul.EVERY_ROW_ALONE)
    assert (
        np.abs(got - x[:1].astype(np.float64) @ weights.T) <= tolerance(x[:1], weights, "Q8_0")
    ).all()
    for row, together in zip(x[:, None], got, strict=True):
        alone = product(ops, raw.reshape(-1), "Q8_0", 48, row, matmul.EVERY_ROW_ALONE)
        np.testing.assert_array_equal(alone[0], together)


def test_what_is_not_finite_shows_in_its_row_alone(folder: Path) -> None:
    ops = ops_of(80, folder)
    raw, x = random_raw("Q4_K", 33, 512), activations(4, 512)
    clean = product(ops, raw, "Q4_K", 33, x, matmul.EVERY_ROW_ALONE)
    for bad in (np.nan, np.inf, -np.inf):
        x[1, 77] = bad
        got = product(ops, raw, "Q4_K", 33, x, matmul.EVERY_ROW_ALONE)
        assert not np.isfinite(got[1]).any()
        np.testing.assert_array_equal(got[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("cols", [1, 7, 31, 100])
def test_float_columns_of_any_number(cols: int, folder: Path) -> None:
    for arch in (70, 80):
        ops = ops_of(arch, folder)
        raw, x = random_raw("F16", 9, cols), activations(6, cols)
        weights = values_of(raw, "F16", 9)
        got = product(ops, raw, "F16", 9, x, Policy(cublas_from=1))  # which cannot take them
        error = np.abs(got - x.astype(np.float64) @ weights.T)
        assert (error <= tolerance(x, weights, "F16")).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_sizes_are_the_sources(arch: int, folder: Path) -> None:
    """chunks.py against the templates: bytes of a warp's memory."""
    lines = [f"  out[i++] = ChunkMemory<formats::{name}>::bytes(room);" for name in CHUNKS]
    source = (
        f'#include "{HEADER.name}"\n#define MANY 0\n{source_of("matmul_chunk.cuh")}\n'
        "using namespace voltapile;\n"
        'extern "C" void sizes(int room, int* out) {\n  int i = 0;\n' + "\n".join(lines) + "\n}\n"
    )
    library = compiled(source, [f"-DVP_ARCH={10 * arch}"], folder)
    for room in (1, 5, 8, 32):
        found = (ctypes.c_int * len(CHUNKS))()
        library.sizes(room, found)
        assert list(found) == [chunk.warp_bytes(room, arch) for chunk in CHUNKS.values()]


@pytest.mark.parametrize("arch", ARCHS)
def test_a_token_of_every_format_fits(arch: int) -> None:
    for chunk in CHUNKS.values():
        assert matmul.room_for(1, [chunk], arch) == 1
        room = matmul.room_for(100, [chunk], arch)
        assert matmul.shared_bytes(room, [chunk], arch) <= max_shared(arch)
    assert matmul.room_for(8, [CHUNKS["Q4_K"]], 70) == 8
