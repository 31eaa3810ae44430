"""Matrix products in C++ against float64 numpy: every format, instruction set and shape.

The tolerance is derived, not tuned:
 - activations are rounded to integers with one scale for 32 values, range at least 32639, so each
   is off by at most a 65278th of the largest of its block;
 - float32 sums: at most 6 roundings for a block of 32 columns, taken as K * 2^-24 of sum |x| |w|,
   which leaves a factor of 5 for formats whose scale and minimum parts cancel.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator

import gguf
import numpy as np
import pytest
from voltapile.kernels.cpu import _cpu
from voltapile.kernels.cpu.ops import CpuOps, CpuWeight
from voltapile.kernels.cpu.weights import flat
from voltapile.shm.formats import format_of

from .test_formats import FORMATS, HALVES, scatter_iq1_m

FLOATS = ("F32", "F16", "BF16")
ISAS = ("plain", "avx2", "avx512")
# (N, K, T): rows that are no multiple of the lanes, one row, one block, prompts, a panel in parts
SHAPES = [
    (1, 256, 1), (7, 512, 2), (33, 768, 5), (64, 256, 8), (37, 512, 9), (50, 256, 33),
    (19, 512, 130), (16, 13056, 11), (17, 40960, 9),
]  # fmt: skip


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _cpu.isa()
    try:
        _cpu.set_isa(request.param)
    except ValueError:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    _cpu.set_isa(before)


def make_ops(threads: int = 1) -> CpuOps:
    return CpuOps(threads, 64 << 20)


def random_raw(name: str, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Bytes of a matrix with values of order 1."""
    rng = np.random.default_rng([seed, rows, cols])
    kind = format_of(name)
    if name in FLOATS:
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
        return np.ascontiguousarray(quantised).view(np.uint8).reshape(-1)
    raw = rng.integers(0, 256, (rows, cols // kind.block_len, kind.block_bytes), dtype=np.uint8)
    for offset in HALVES.get(name, ()):
        scales = rng.uniform(0.001, 0.02, (*raw.shape[:2], 1)).astype(np.float16)
        raw[..., offset : offset + 2] = scales.view(np.uint8)
    if name == "IQ1_M":
        scales = rng.uniform(0.001, 0.02, raw.shape[0] * raw.shape[1]).astype(np.float16)
        scatter_iq1_m(raw.reshape(-1, kind.block_bytes), scales.view(np.uint16))
    if name == "MXFP4":
        raw[..., 0] = rng.integers(120, 128, raw.shape[:2])
    if name.startswith("NVFP4"):
        raw[..., -36:-32] = rng.integers(0, 40, (*raw.shape[:2], 4))
    if name == "NVFP4_SCALED":
        factors = rng.uniform(0.1, 4, (*raw.shape[:2], 1)).astype(np.float32)
        raw[..., :4] = factors.view(np.uint8)
    return raw.reshape(-1)


def values_of(raw: np.ndarray, name: str, rows: int) -> np.ndarray:
    kind = format_of(name)
    blocks = raw.reshape(-1, kind.block_bytes)
    if name == "NVFP4_SCALED":
        factors = np.ascontiguousarray(blocks[:, :4]).view(np.float32).astype(np.float64)
        values = values_of(np.ascontiguousarray(blocks[:, 4:]), "NVFP4", len(blocks)) * factors
        return values.reshape(rows, -1)
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    return values.astype(np.float64).reshape(rows, -1)


def activations(tokens: int, cols: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng([seed, tokens, cols])
    size = 10.0 ** rng.integers(-3, 4, (tokens, 1))  # rows of very different sizes
    return (rng.standard_normal((tokens, cols)) * size).astype(np.float32)


def tolerance(x: np.ndarray, weights: np.ndarray, is_float: bool) -> np.ndarray:
    sums = np.abs(x.astype(np.float64)) @ np.abs(weights).T * x.shape[1] * 2.0**-24
    if is_float:
        return sums
    largest = np.abs(x.astype(np.float64)).reshape(len(x), -1, 32).max(-1)
    return sums + largest @ np.abs(weights).reshape(len(weights), -1, 32).sum(-1).T / 65278


def weight_of(ops: CpuOps, raw: np.ndarray, name: str, shape: tuple[int, int]) -> CpuWeight:
    return ops.weight(raw, name, shape)


def vector_of(ops: CpuOps, values: np.ndarray) -> CpuWeight:
    return ops.weight(values.astype(np.float32).view(np.uint8), "F32", values.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_linear(isa: str, name: str, shape: tuple[int, int, int]) -> None:
    rows, cols, tokens = shape
    raw, x = random_raw(name, rows, cols), activations(tokens, cols)
    weights = values_of(raw, name, rows)
    got = [
        ops.linear(x, weight_of(ops, raw, name, (rows, cols))).copy()
        for ops in map(make_ops, (1, 2, 3))
    ]
    error = np.abs(got[0] - x.astype(np.float64) @ weights.T)
    assert (error <= tolerance(x, weights, name in FLOATS)).all()
    np.testing.assert_array_equal(got[0], got[1])  # whatever the number of threads
    np.testing.assert_array_equal(got[0], got[2])


@pytest.mark.parametrize("cols", [32, 64, 96, 160, 288, 576])
@pytest.mark.parametrize("name", [n for n in FORMATS if format_of(n).block_len == 32])
def test_columns_that_end_inside_a_step(isa: str, name: str, cols: int) -> None:
    raw, x = random_raw(name, 35, cols), activations(3, cols)
    weights = values_of(raw, name, 35)
    ops = make_ops()
    got = ops.linear(x, weight_of(ops, raw, name, (35, cols)))
    error = np.abs(got - x.astype(np.float64) @ weights.T)
    assert (error <= tolerance(x, weights, False)).all()


@pytest.mark.parametrize("cols", [1, 7, 16, 31, 33, 100])
@pytest.mark.parametrize("name", FLOATS)
def test_float_columns_of_any_number(isa: str, name: str, cols: int) -> None:
    raw, x = random_raw(name, 9, cols), activations(6, cols)
    weights = values_of(raw, name, 9)
    ops = make_ops(2)
    got = ops.linear(x, weight_of(ops, raw, name, (9, cols)))
    error = np.abs(got - x.astype(np.float64) @ weights.T)
    assert (error <= tolerance(x, weights, True) + 1e-12).all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_has_the_same_bits_in_any_company(isa: str, name: str) -> None:
    rows, cols = 35, 768
    raw, x = random_raw(name, rows, cols), activations(140, cols)
    ops = make_ops(2)
    weight = weight_of(ops, raw, name, (rows, cols))
    other = weight_of(ops, random_raw("Q8_0", 50, cols), "Q8_0", (50, cols))
    alone = np.concatenate([ops.linear(row, weight).copy() for row in x[:, None]])
    for tokens in (2, 3, 4, 5, 7, 8, 9, 16, 33, 140):
        start = 140 - tokens
        np.testing.assert_array_equal(ops.linear(x[start:], weight), alone[start:])
        ops.reset_scratch()
        beside = ops.linears(x[start:], (other, weight, other), (None, None, None))[1]
        np.testing.assert_array_equal(beside, alone[start:])
        ops.reset_scratch()


def test_bias_and_residual(isa: str) -> None:
    raw, x = random_raw("Q4_1", 50, 96), activations(11, 96)
    rng = np.random.default_rng(3)
    bias, base = rng.standard_normal(50), rng.standard_normal((11, 50)).astype(np.float32)
    ops = make_ops(2)
    weight = weight_of(ops, raw, "Q4_1", (50, 96))
    plain = ops.linear(x, weight)
    with_bias = ops.linear(x, weight, vector_of(ops, bias))
    np.testing.assert_array_equal(with_bias, plain + bias.astype(np.float32))
    total = base.copy()
    assert ops.linear(x, weight, vector_of(ops, bias), add_to=total) is total
    np.testing.assert_array_equal(total, base + with_bias)


def test_products_of_several_types_share_x(isa: str) -> None:
    x = activations(12, 512)
    ops = make_ops(3)
    names = ("Q4_K", "F16", "Q6_K", "Q4_0")
    weights = [weight_of(ops, random_raw(n, 21, 512), n, (21, 512)) for n in names]
    together = ops.linears(x, weights, [None] * 4)
    for weight, got in zip(weights, together, strict=True):
        np.testing.assert_array_equal(got, ops.linear(x, weight))


def activation_of(kind: str, x: np.ndarray) -> np.ndarray:
    if kind == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("name", ["F32", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_glu(isa: str, name: str, kind: str, tokens: int) -> None:
    rows, cols = 37, 256
    gate, up = random_raw(name, rows, cols, 5), random_raw(name, rows, cols, 6)
    gate_bias, up_bias = np.random.default_rng(7).standard_normal((2, rows))
    x = activations(tokens, cols, 8) / 1000
    ops = make_ops(2)
    shape = (rows, cols)
    got = ops.glu(
        x, weight_of(ops, gate, name, shape), weight_of(ops, up, name, shape), kind,
        vector_of(ops, gate_bias), vector_of(ops, up_bias),
    )  # fmt: skip
    gates, ups = values_of(gate, name, rows), values_of(up, name, rows)
    g = x.astype(np.float64) @ gates.T + gate_bias.astype(np.float32)
    u = x.astype(np.float64) @ ups.T + up_bias.astype(np.float32)
    off = [tolerance(x, w, name == "F32") + 2.0**-22 * np.abs(v) for w, v in ((gates, g), (ups, u))]
    # neither activation is steeper than 1.13; then 8 roundings
    with np.errstate(over="ignore"):
        active = activation_of(kind, g)
    bound = 1.13 * off[0] * (np.abs(u) + off[1]) + np.abs(active) * off[1]
    assert (np.abs(got - active * u) <= bound + 2.0**-21 * np.abs(active * u) + 1e-7).all()


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activations_to_few_ulps(isa: str, kind: str) -> None:
    """Through an identity matrix: gate is x itself, up is 1."""
    x = np.concatenate([np.linspace(-120, 120, 4001), [0.0, -0.0, 1e-30, -1e-30, 1e30, -1e30]])
    x = x.astype(np.float32)[:, None]
    ops = make_ops()
    one = weight_of(ops, np.ones(1, np.float32).view(np.uint8), "F32", (1, 1))
    nothing = weight_of(ops, np.zeros(1, np.float32).view(np.uint8), "F32", (1, 1))
    bias = vector_of(ops, np.ones(1))
    got = ops.glu(x, one, nothing, kind, None, bias)
    exact = x.astype(np.float64)
    with np.errstate(over="ignore"):
        if kind == "gelu_tanh":  # the form without cancellation
            slope = np.sqrt(8 / np.pi) * (exact + 0.044715 * exact**3)
        else:
            slope = exact
        want = exact / (1 + np.exp(-slope))
    # exp(z) for a float32 z is as uncertain as z: |z| 2^-24; beyond -87 results are denormal
    allowed = (8 + 2 * np.minimum(np.abs(slope), 104)) * 2.0**-24 * np.abs(want) + 2e-36
    assert (np.abs(got - want) <= allowed).all()


@pytest.mark.parametrize("name", FORMATS)
def test_embed(isa: str, name: str) -> None:
    raw = random_raw(name, 11, 512)
    ops = make_ops(3)
    got = ops.embed(weight_of(ops, raw, name, (11, 512)), np.array([10, 0, 3, 3, 7], np.int32))
    want = values_of(raw, name, 11)[[10, 0, 3, 3, 7]].astype(np.float32)
    np.testing.assert_array_equal(got, want)
    scaled = ops.embed(weight_of(ops, raw, name, (11, 512)), np.array([3], np.int32), 25.5)
    np.testing.assert_array_equal(scaled[0], want[2] * np.float32(25.5))


@pytest.mark.parametrize("name", ["F16", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tokens", [3, 20])
def test_what_is_not_finite_shows_in_its_row_alone(
    isa: str, name: str, bad: float, tokens: int
) -> None:
    raw, x = random_raw(name, 20, 512), activations(tokens, 512)
    ops = make_ops(2)
    weight = weight_of(ops, raw, name, (20, 512))
    clean = ops.linear(x, weight)
    x[1, 77] = bad
    got = ops.linear(x, weight)
    assert not np.isfinite(got[1]).any()
    others = [t for t in range(tokens) if t != 1]
    np.testing.assert_array_equal(got[others], clean[others])


@pytest.mark.parametrize("name", ["F32", "Q4_1", "Q8_0", "Q6_K"])
def test_extreme_blocks(isa: str, name: str) -> None:
    """Zero, denormal and huge activations. The parts of scale and minimum are added apart, so that
    a product overflows at about a 300th of float32's range."""
    raw, cols = random_raw(name, 20, 256), 256
    weights = values_of(raw, name, 20)
    x = activations(6, cols) / 1000
    x[0] = 0
    x[1] = 1e-42
    x[2] *= 1e-36
    x[3] = 1e34
    x[4, :32] = 0
    x[4, 32] = 1e35
    x[5, 64:96] = 0
    ops = make_ops()
    got = ops.linear(x, weight_of(ops, raw, name, (20, cols)))
    want = x.astype(np.float64) @ weights.T
    # a block is never scaled as if its largest value were below 2^-100
    floor = np.abs(weights).sum(-1) * 2.0**-100 / 65278 + 1e-42
    error = np.abs(got - want)
    assert (error <= tolerance(x, weights, name == "F32") + floor).all()
    assert (got[0] == 0).all()


def test_refusals() -> None:
    ops = make_ops()
    with pytest.raises(ValueError, match="Q8_K"):
        weight_of(ops, np.zeros(292, np.uint8), "Q8_K", (1, 256))


def test_factors_of_a_matrix_and_of_experts(isa: str) -> None:
    """As the same values multiplied by hand: one factor, and one for each of three experts."""
    ops, raw, x = make_ops(), random_raw("NVFP4", 60, 128), activations(9, 128)
    plain = ops.linear(x, weight_of(ops, raw, "NVFP4", (60, 128))).copy()
    scaled = ops.scaled_weight(raw, "NVFP4", (60, 128), np.array([0.375], np.float32))
    np.testing.assert_array_equal(ops.linear(x, scaled), plain * np.float32(0.375))
    part = ops.weight_rows(scaled, 16, 48)
    np.testing.assert_array_equal(ops.linear(x, part), plain[:, 16:48] * np.float32(0.375))
    tokens = np.array([3, 59], np.int32)
    expected = values_of(raw, "NVFP4", 60)[tokens].astype(np.float32) * np.float32(0.375)
    np.testing.assert_array_equal(ops.embed(scaled, tokens), expected)
    factors = np.array([2.0, 0.5, 3.0], np.float32)
    experts = ops.scaled_weight(raw, "NVFP4", (3, 20, 128), factors)
    expected = values_of(raw, "NVFP4", 60).reshape(3, -1) * factors[:, None]
    np.testing.assert_array_equal(flat(experts), expected.astype(np.float32).reshape(-1))


def before_a_wall(raw: np.ndarray) -> np.ndarray:
    """A copy whose last byte is the last that may be read: the next page is forbidden."""
    page = mmap.PAGESIZE
    room = -(-raw.nbytes // page) * page
    area = np.frombuffer(mmap.mmap(-1, room + page), np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert protect(ctypes.c_void_p(area.ctypes.data + room), ctypes.c_size_t(page), 0) == 0
    area[room - raw.nbytes : room] = raw
    return area[room - raw.nbytes : room]


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect")
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 32, 33])
@pytest.mark.parametrize("name", FORMATS)
def test_nothing_is_read_past_the_matrix(isa: str, name: str, rows: int) -> None:
    cols = format_of(name).block_len * 3 if name not in FLOATS else 77
    raw = before_a_wall(random_raw(name, rows, cols))
    ops = make_ops()
    weight = weight_of(ops, raw, name, (rows, cols))
    for tokens in (1, 9):
        assert np.isfinite(ops.linear(activations(tokens, cols), weight)).all()
    assert np.isfinite(ops.embed(weight, np.array([rows - 1], np.int32))).all()
