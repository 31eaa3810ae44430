"""The descriptions of the backends agree with topology's record and with what is built."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest
from voltapile.kernels.backend import NAMES, describe
from voltapile.kernels.cpu.ops import CpuOps
from voltapile.kernels.load import load
from voltapile.shm.formats import format_of
from voltapile.topology.plan import Backend


@pytest.mark.parametrize("name", NAMES)
def test_fields_are_those_of_backend(name: str) -> None:
    fields = describe(name)
    assert set(fields) <= set(Backend.__struct_fields__)  # some have defaults
    backend = Backend(**fields)
    assert backend.name == name
    assert {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"} <= set(backend.formats)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cuda"])  # tests/gpu has it
def test_every_format_can_be_loaded(name: str) -> None:
    ops = load(name, threads=1, scratch_bytes=1 << 20)
    for type_name in Backend(**describe(name)).formats:
        kind = format_of(type_name)
        data = np.zeros(2 * kind.block_bytes * (256 // kind.block_len), np.uint8)
        assert ops.weight(data, type_name, (2, 256)).shape == (2, 256)


def test_planned_activation_bytes_hold() -> None:
    from voltapile.kernels.cpu import _cpu

    backend = Backend(**describe("cpu"))
    for columns in (256, 576, 4096):
        planned = backend.activation_bytes * 7 * columns + 64  # of alignment
        assert _cpu.quantised_bytes(7, columns) <= planned


def test_planned_cache_bytes_hold() -> None:
    backend = Backend(**describe("cpu"))
    ops = CpuOps(1, 1 << 16)
    for name, (length, nbytes) in backend.kv_types.items():
        cache = ops.kv_cache(3, 2, backend.page_tokens, 64, 32, name, name)
        planned = 3 * 2 * backend.page_tokens * (64 + 32) // length * nbytes
        assert cache.keys.nbytes + cache.values.nbytes == planned


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="unknown backend 'tpu'; there are cpu, reference"):
        describe("tpu")
    with pytest.raises(ValueError, match="unknown backend"):
        load("tpu")


def test_unknown_tensor_type() -> None:
    ops = CpuOps(1, 1 << 16)
    length, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_K]
    with pytest.raises(ValueError, match="Q8_K"):
        ops.weight(np.zeros(nbytes, np.uint8), "Q8_K", (1, length))


def test_cuda_without_cupy_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "voltapile.kernels.cuda.ops", raising=False)
    monkeypatch.delitem(sys.modules, "voltapile.kernels.cuda.device", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ValueError, match=r"needs cupy: pip install '.\[cuda\]'"):
        load("cuda")
