"""Chosen experts of generated rows, and with them the shared one: kernels run on the CPU from their
own source, against the reference."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import expert_stream
from voltapile.kernels.cuda.chunks import max_shared
from voltapile.kernels.cuda.expert_table import ExpertTable, Shared
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray
from voltapile.kernels.families import SharedExpert

from .emulated_families import EmulatedFamilies
from .emulation import has_compiler
from .test_families import REF, normal, weights_of

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="there is no g++")
SLOW = pytest.mark.slow
STREAMED = {"expert_up_stream", "expert_down_stream", "expert_parts", "expert_join"}
H100: Any = SimpleNamespace(arch=90, multiprocessors=132)
ARCHS = [80, 90, *(pytest.param(n, marks=SLOW) for n in (70, 75))]


@pytest.fixture(scope="module", params=ARCHS)
def ops(request: pytest.FixtureRequest, folder: Path) -> Any:
    return EmulatedFamilies(request.param, folder, max_shared(request.param))


SHARED = [
    pytest.param("Q4_K", "Q6_K", "Q5_K", "Q5_K", 256, 256, 256, marks=SLOW),
    ("Q4_K", "Q5_1", "Q8_0", "Q8_0", 256, 96, 160),
    ("Q8_0", "Q8_0", "Q8_0", "Q8_0", 1280, 256, 32),  # rings go round, as chunks are dealt unevenly
    pytest.param("IQ4_NL", "Q5_0", "Q8_0", "Q8_0", 64, 96, 32, marks=SLOW),
    pytest.param("Q4_K", "Q8_0", "Q8_0", "Q8_0", 3584, 32, 288, marks=SLOW),  # 14 chunks
]


@needs_compiler
@pytest.mark.parametrize(("up", "down", "other", "last", "width", "inner", "wide"), SHARED)
def test_shared_expert(
    ops: Any,
    monkeypatch: pytest.MonkeyPatch,
    up: str,
    down: str,
    other: str,
    last: str,
    width: int,
    inner: int,
    wide: int,
) -> None:
    """11 tokens, of which 9 share an expert, and one has none of those that are here."""
    shapes = (up, (3, inner, width)), (up, (3, inner, width)), (down, (3, width, inner))
    shapes += (other, (wide, width)), (other, (wide, width)), (last, (width, wide))
    made = [weights_of(ops, np.zeros(shape, np.float32), name) for name, shape in shapes]
    made.append(weights_of(ops, 0.1 * normal(3, width)))
    tokens, rng = 11, np.random.default_rng(0)
    x, old = normal(7, tokens, width), normal(8, tokens, width)
    chosen = np.stack([rng.permutation(6)[:3] for _ in range(tokens)]).astype(np.int32)
    chosen[:9] = [[1, 5, 3], [4, 1, 2], [1, 3, 0]] * 3
    chosen[9] = 0, 4, 5
    weights = np.abs(normal(9, tokens, 3))
    table, truth = (
        each.expert_table(*(m[i] for m in made[:3]), 1) for i, each in enumerate((ops, REF))
    )
    mine, theirs = (SharedExpert(*(m[i] for m in made[3:])) for i in range(2))
    expected = REF.experts(x, (chosen, weights), truth, old.copy(), theirs)

    def found(part: slice) -> np.ndarray:
        own = (ops.array(each[part]) for each in (x, chosen, weights, old))
        mine_x, *routing, mine_old = own
        return np.array(ops.to_host(ops.experts(mine_x, tuple(routing), table, mine_old, mine)))

    launched = getattr(ops, "launched", [])  # a GPU's Ops do not tell
    launched.clear()
    together = found(slice(None))
    np.testing.assert_allclose(together, expected, atol=1e-3 * np.abs(expected).max())
    if ops.arch >= 80 and up != "IQ4_NL":
        assert launched or not isinstance(ops, EmulatedFamilies)
        assert {instance.function for instance, *_ in launched} <= STREAMED
    for part in (slice(2, 3), slice(9, 10), slice(8, 11), slice(1, 9)):
        np.testing.assert_array_equal(found(part), together[part])
    monkeypatch.setattr(expert_stream, "DOWN_WARPS", (2, 2))  # each with several chunks in turn
    np.testing.assert_array_equal(found(slice(8, 11)), together[8:11])


def _layer(
    sizes: tuple[int, int, int], names: tuple[str, str], shared: tuple[int, str, str] | None = None
) -> expert_stream.Layer:
    """sizes: experts, columns, rows of a gate. shared: its rows, its formats."""

    def weight(name: str, *shape: int) -> CudaWeight:
        return CudaWeight(shape, 0, name, 0, 0, is_tiled=name != "Q5_1" and shape[-1] % 256 == 0)

    experts, columns, rows = sizes
    gate, down = weight(names[0], experts, rows, columns), weight(names[1], experts, columns, rows)
    table = ExpertTable(gate, gate, down, 0, DeviceArray(0, (experts,), np.uint8))
    if shared is None:
        return expert_stream.Layer(table, None)
    own = weight(shared[1], shared[0], columns)
    return expert_stream.Layer(table, Shared(own, own, weight(shared[2], columns, shared[0]), None))


@pytest.mark.parametrize(
    ("layer", "used"),
    [
        (_layer((128, 2048, 768), ("Q4_K", "Q6_K")), 8),  # Qwen3-30B-A3B
        (_layer((256, 2048, 512), ("Q4_K", "Q6_K"), (512, "Q5_K", "Q6_K")), 8),  # 35B-A3B
        (_layer((512, 2560, 640), ("Q4_K", "Q5_1"), (640, "Q8_0", "Q8_0")), 10),  # Flash-Next
    ],
)
def test_blocks_beside_each_other(layer: expert_stream.Layer, used: int) -> None:
    """On an H100: so that weights of down follow those of up."""
    assert layer.fits(used, max_shared(90))
    way = layer.up_way(1, used, H100)
    up, down = way.nbytes + 1024 + 128, layer.down_bytes(used) + 1024 + 1024
    assert up + down <= 228 << 10 < 2 * up


def test_what_is_not_streamed() -> None:
    assert not _layer((8, 320, 256), ("Q8_0", "Q8_0")).fits(4, max_shared(90))  # rows of up
    rows = _layer((8, 256, 320), ("Q4_K", "Q8_0"))  # rows of down: whole in a block, or not at all
    assert rows.fits(4, max_shared(90))
    assert not rows.has_parts
    assert _layer((8, 256, 512), ("Q4_K", "Q8_0")).has_parts
