"""The scalar unpack of every format against the gguf package, to the bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from voltapile.kernels.cpu import _cpu, weights
from voltapile.shm.formats import format_of

FORMATS = [
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "NVFP4",
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "TQ1_0",
    "TQ2_0",
]
# Where a block keeps its half-precision scales.
HALVES = {
    "F16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ4_NL": [0], "IQ4_XS": [0], "IQ1_S": [0], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0],
    "IQ3_XXS": [0], "IQ3_S": [0], "TQ1_0": [52], "TQ2_0": [64],
}  # fmt: skip
# Both zeros, the least and greatest denormals and normals, infinities, NaNs.
SPECIAL_HALVES = [
    0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x8400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF,
    0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFE00,
]  # fmt: skip


def unpack(data: np.ndarray, name: str, count: int) -> np.ndarray:
    return weights.unpack(data, format_of(name).id, count)


def scatter_iq1_m(raw: np.ndarray, halves: np.ndarray) -> None:
    """Puts the half of each block into the upper nibbles of its four last u16."""
    scales = raw[:, 48:56].copy().view(np.uint16)
    parts = halves.astype(np.uint32)[:, None] >> np.array([0, 4, 8, 12], np.uint32)
    scales = scales & 0xFFF | (parts & 15).astype(np.uint16) << 12
    raw[:, 48:56] = scales.astype(np.uint16).view(np.uint8)


def expected(raw: np.ndarray, name: str) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[name]
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, kind).astype(np.float32).reshape(-1)


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)  # a NaN's payload is nobody's business
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], want.view(np.uint32)[~nan])


@pytest.mark.parametrize("name", FORMATS)
def test_random_blocks(name: str) -> None:
    kind = format_of(name)
    rng = np.random.default_rng(kind.id)
    raw = rng.integers(0, 256, (4000, kind.block_bytes), dtype=np.uint8)
    assert_same_bits(unpack(raw, name, raw.shape[0] * kind.block_len), expected(raw, name))


@pytest.mark.parametrize("name", HALVES)
def test_special_scales(name: str) -> None:
    kind = format_of(name)
    rng = np.random.default_rng(1)
    pairs = np.array([(a, b) for a in SPECIAL_HALVES for b in SPECIAL_HALVES], np.uint16)
    raw = rng.integers(0, 256, (len(pairs), kind.block_bytes), dtype=np.uint8)
    for offset, halves in zip(HALVES[name], pairs.T, strict=False):
        raw[:, offset : offset + 2] = np.ascontiguousarray(halves).view(np.uint8).reshape(-1, 2)
    assert_same_bits(unpack(raw, name, raw.shape[0] * kind.block_len), expected(raw, name))


def test_special_scales_of_iq1_m() -> None:
    raw = np.random.default_rng(4).integers(0, 256, (len(SPECIAL_HALVES), 56), dtype=np.uint8)
    scatter_iq1_m(raw, np.array(SPECIAL_HALVES))
    assert_same_bits(unpack(raw, "IQ1_M", len(raw) * 256), expected(raw, "IQ1_M"))


def test_every_exponent_of_mxfp4() -> None:
    raw = np.random.default_rng(2).integers(0, 256, (256, 17), dtype=np.uint8)
    raw[:, 0] = np.arange(256)
    assert_same_bits(unpack(raw, "MXFP4", 256 * 32), expected(raw, "MXFP4"))


def test_every_scale_of_nvfp4() -> None:
    raw = np.random.default_rng(3).integers(0, 256, (256, 36), dtype=np.uint8)
    raw[:, :4] = np.arange(256)[:, None] + np.array([0, 64, 128, 192])
    assert_same_bits(unpack(raw, "NVFP4", 256 * 64), expected(raw, "NVFP4"))


def test_every_half() -> None:
    raw = np.arange(65536, dtype=np.uint16).view(np.uint8)
    assert_same_bits(unpack(raw, "F16", 65536), expected(raw, "F16"))
    assert_same_bits(unpack(raw, "BF16", 65536), expected(raw, "BF16"))


def test_written_by_hand() -> None:
    """Q4_1, d = 0.5 and m = -2: bytes 0x10, 0x32 ... are columns 0, 16, 1, 17."""
    raw = np.zeros(20, np.uint8)
    raw[:4] = np.array([0.5, -2], np.float16).view(np.uint8)
    raw[4:6] = (0x10, 0x32)
    values = unpack(raw, "Q4_1", 32)
    assert [values[i] for i in (0, 16, 1, 17, 2)] == [-2, -1.5, -1, -0.5, -2]


def test_unknown_types_are_refused() -> None:
    assert not _cpu.is_supported(4)
    with pytest.raises(ValueError, match="type 4"):
        _cpu.unpack_to(4, np.zeros(18, np.uint8), np.zeros(32, np.float32))


@pytest.mark.parametrize(("nbytes", "values"), [(35, 64), (0, 32), (36, 33), (17, 32)])
def test_blocks_must_be_whole_and_there(nbytes: int, values: int) -> None:
    with pytest.raises(ValueError, match=f"type 2: {nbytes} bytes for {values} values"):
        _cpu.unpack_to(2, np.zeros(nbytes, np.uint8), np.zeros(values, np.float32))


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "F32"])
def test_quantzoo(name: str, golden: Path) -> None:
    with np.load(golden / "quantzoo/quantzoo.npz") as zoo:
        keys = {key.lower(): key for key in zoo.files}
        raw, values = (zoo[keys[f"{name.lower()}.{part}"]] for part in ("raw", "values"))
    assert_same_bits(unpack(raw, name, values.size), values.reshape(-1))
