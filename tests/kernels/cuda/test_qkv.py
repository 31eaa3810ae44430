"""A product of q, k and v that goes on with their heads, on the CPU: the bits of two launches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import heads, matmul, pages, qkv, stream
from voltapile.kernels.cuda.chunks import max_shared
from voltapile.kernels.cuda.collectives import CudaCollectives
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance

from ..test_matmul import activations, random_raw
from . import attention_twin as twin
from .emulation import has_compiler
from .test_attention_maps import Emulated

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")


class Layer:
    """What q, k and v are made of, and worlds to put keys and values in."""

    def __init__(
        self,
        ops: Any,
        names: tuple[str, str, str],
        case: twin.Case,
        columns: int,
        put: twin.Put,
    ) -> None:
        self.ops, self.put, self.case = ops, put, case
        counts = (case.heads * case.dim, case.kv_heads * case.dim, case.kv_heads * case.value_dim)
        self.weights = [
            ops.weight(random_raw(name, rows, columns, i), name, (rows, columns))
            for i, (name, rows) in enumerate(zip(names, counts, strict=True))
        ]
        bias = np.random.default_rng(9).standard_normal(counts[1], np.float32)
        self.biases = None, ops.weight(bias.view(np.uint8), "F32", bias.shape), None
        self.x = put(activations(1, columns) / 1000)

    def angles(self) -> DeviceArray:
        return self.put(np.random.default_rng(5).standard_normal((1, 64, 2), np.float32))

    def check(self, worlds: list[twin.World], q: list[DeviceArray]) -> None:
        np.testing.assert_array_equal(*(self.ops.to_host(each) for each in q))
        for ours, theirs in zip(*(pages.page_parts(world.cache) for world in worlds), strict=True):
            np.testing.assert_array_equal(self.ops.to_host(ours), self.ops.to_host(theirs))


SAME = ("Q4_K",) * 3


@pytest.mark.parametrize(
    ("names", "columns", "layout", "types", "processors"),
    [
        (SAME, 512, "neox", ("f16", "f16"), 13),
        (SAME, 4096, "neox", ("f16", "f16"), 3),  # a broad team
        (("Q4_K", "Q4_K", "Q6_K"), 256, "norm", ("q8_0", "q4_0"), 7),
        (("Q8_0",) * 3, 256, "neox", ("q8_0", "f16"), 5),
        (("Q6_K", "Q4_K", "Q4_K"), 256, "neox", ("f16", "f16"), 40),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_normed", [True, False])
def test_bits_are_those_of_two_launches(
    names: tuple[str, str, str],
    columns: int,
    layout: str,
    types: tuple[str, str],
    processors: int,
    is_normed: bool,
    folder: Path,
) -> None:
    ops = Emulated(90, folder, max_shared(90))
    ops.multiprocessors = processors
    case = twin.Case([(0, 62, 1)], 128, 6, 2, 128, types)
    layer = Layer(ops, names, case, columns, ops.array)
    worlds = [twin.World(ops, ops.array, case) for _ in range(2)]
    gains = np.random.default_rng(3).standard_normal((2, 128), np.float32)
    norms = tuple(
        ops.weight(each.view(np.uint8), "F32", each.shape) if is_normed else None for each in gains
    )
    angles, found = layer.angles(), []
    for position in (62, 63, 64):
        batch, q = worlds[0].batch([(0, position)], 1), []
        for is_late, world in enumerate(worlds):
            late = qkv.product_of(ops, layer.x, layer.weights, layer.biases, matmul.EVERY_ROW_ALONE)
            assert late is not None
            assert late.fits(late.outs, world.cache, 64)
            if not is_late:
                late.launch(())
            tail = angles, layout, world.cache, batch, 0, 1e-6, norms, late if is_late else None
            q.append(heads.rope_store(ops, *late.outs, *tail))
        layer.check(worlds, q)
        assert not ops.to_host(worlds[1].cache.tickets).any()
        found.append(ops.to_host(q[1]))
    assert np.isfinite(found).all()
    plain, turned, whole = (each[0] for each in ops.launched[-3:])
    assert (turned, whole) == (heads.ROPE_STORE[128], stream.HEADED[plain])


class Late(CudaCollectives):
    """Writes down what is launched; arrays are numbers."""

    multiprocessors, arch = 132, 90

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.end = 1 << 20

    def _launcher(self) -> Any:
        return self

    def kernel(self, instance: Instance) -> Any:
        self._catch_up()
        name = "heads" if instance in stream.HEADED.values() else instance.function
        return lambda grid, block, args, shared=0: self.launched.append(name)

    def scratch(self, shape: tuple[int, ...], dtype: Any = np.float32) -> DeviceArray:
        self.end += 1 << 20
        return DeviceArray(self.end, shape, dtype)


def test_a_product_waits_for_what_becomes_of_its_heads() -> None:
    ops = Late()
    cache = pages.CudaKv(
        *(ops.scratch((1,)) for _ in range(2)), ops.scratch((16384,)), 1, 4, 128, 128, "f16", "f16"
    )
    gain = CudaWeight((2048,), 8192, "F32", 1 << 10, 8192)
    rows = 4096, 512, 512
    weights = [CudaWeight((n, 2048), 1, "Q4_K", 1 << 12, 1152, is_tiled=True) for n in rows]

    def start(tokens: int = 1, rows: int = 3) -> tuple[DeviceArray, ...]:
        ops.launched.clear()
        x = ops.scratch((tokens, 2048))
        h = ops.rms_norm(x, gain, 1e-6)
        nothing = [None] * rows
        return ops._linears(h, weights[:rows], nothing, matmul.EVERY_ROW_ALONE)

    outs = start()
    assert ops.launched == []
    late = ops._take_heads(outs, cache, 64)
    assert late is not None
    late.join(1, ())
    ops._catch_up()
    assert ops.launched == ["heads"]
    start()
    ops._catch_up()
    assert ops.launched == ["matmul_stream"]
    others = start()
    assert ops._take_heads(outs, cache, 64) is None  # of something else
    assert ops._take_heads(others, cache, 32) is None
    assert ops._take_heads(others, replace(cache, key_dim=64), 64) is None
    assert ops._take_heads(others, replace(cache, tickets=outs[1]), 64) is None
    ops.all_reduce(others[0], others[0].shape)
    ops._catch_up()
    assert ops.launched == ["matmul_stream"]
    for tokens, count in ((2, 3), (1, 2)):
        assert ops._take_heads(start(tokens, count), cache, 64) is None
        assert ops.launched == ["matmul_stream"]
