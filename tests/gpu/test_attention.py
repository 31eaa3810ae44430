"""Attention on the GPU against float64 numpy, and the same bits in every company."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import attention as launcher
from voltapile.kernels.cuda import pages

pytestmark = pytest.mark.gpu


def _load_twin() -> ModuleType:
    path = Path(__file__).parents[1] / "kernels/cuda/attention_twin.py"
    spec = importlib.util.spec_from_file_location("gpu_attention_twin", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


twin = _load_twin()
Case, World = twin.Case, twin.World

SHAPES = [  # head size, query heads, KV heads
    (64, 9, 3),
    (64, 4, 4),
    (80, 8, 2),
    (96, 6, 1),
    (128, 32, 8),
    (128, 12, 1),
    (256, 8, 1),
    (256, 12, 2),
    (72, 6, 2),
    (192, 4, 1),
    (128, 71, 1),
]
TYPES = [("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("f16", "q8_0"), ("q8_0", "q4_0")]


def ids(value: Any) -> str:
    return str(value).replace(" ", "")


def of_shapes_and(types: list[tuple[str, str]]) -> pytest.MarkDecorator:
    """Heads of SHAPES; blocks of 32 values must be whole."""
    cases = [
        (*shape, each) for shape in SHAPES for each in types
        if shape[0] % 32 == 0 or each == ("f16", "f16")
    ]  # fmt: skip
    return pytest.mark.parametrize(("dim", "heads", "kv_heads", "types"), cases, ids=ids)


@of_shapes_and(TYPES)
def test_one_token(
    cuda: Any, put: Any, dim: int, heads: int, kv_heads: int, types: tuple[str, str]
) -> None:
    """Contexts around pages and piece lengths, each row of its own slot."""
    contexts = [0, 1, 62, 63, 64, 127, 128, 1000]
    runs = [(slot, start, 1) for slot, start in enumerate(contexts)]
    case = Case(runs, dim=dim, heads=heads, kv_heads=kv_heads, types=types)
    world = World(cuda, put, case)
    world.check(world.run())


@pytest.mark.parametrize(
    ("context", "kv_heads"),
    [(2048, 32), (4096, 32), (2048, 8), (5120, 8), (5000, 1), (8192, 8), (16384, 1), (40960, 1)],
)
def test_long_contexts(cuda: Any, put: Any, context: int, kv_heads: int) -> None:
    """Where pieces become longer: once while a verify run crosses the border."""
    case = Case([(1, context - 4, 8)], dim=64, heads=kv_heads * 2, kv_heads=kv_heads, sharpness=3)
    world = World(cuda, put, case)
    together = world.run()
    world.check(together)
    for i in range(8):
        np.testing.assert_array_equal(world.run(i, i + 1, 1)[0], together[i])


@of_shapes_and([("f16", "f16"), ("q8_0", "q8_0")])
def test_verify_rows_have_the_bits_of_single_rows(
    cuda: Any, put: Any, dim: int, heads: int, kv_heads: int, types: tuple[str, str]
) -> None:
    runs = [(0, 700, 8), (2, 61, 5), (1, 300, 1)]
    case = Case(runs, dim=dim, heads=heads, kv_heads=kv_heads, types=types)
    world = World(cuda, put, case)
    together = world.run(outputs=14)
    world.check(together)
    for rows in range(1, 9):
        np.testing.assert_array_equal(world.run(0, rows), together[:rows])
    for i in range(14):
        np.testing.assert_array_equal(world.run(i, i + 1, 1)[0], together[i])
    np.testing.assert_array_equal(world.run(outputs=14), together)  # and once more


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q8_0")], ids=ids)
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("window", [0, 700])
def test_streams_have_the_bits_of_one(
    cuda: Any, put: Any, window: int, dim: int, types: tuple[str, str]
) -> None:
    """Of many streams a block takes a whole piece, of one a cluster does (from sm_90 on)."""
    contexts = [0, 63, 511, 700, 2047, 2048, 5000]
    runs = [(slot, context, 1) for slot, context in enumerate(contexts)]
    case = Case(runs, dim=dim, heads=16, kv_heads=8, types=types, window=window)
    world = World(cuda, put, case)
    together = world.run(outputs=len(runs))
    world.check(together)
    for i in range(len(runs)):
        np.testing.assert_array_equal(world.run(i, i + 1, 1)[0], together[i])


@of_shapes_and(TYPES)
def test_mixed_steps(
    cuda: Any, put: Any, dim: int, heads: int, kv_heads: int, types: tuple[str, str]
) -> None:
    """Prompts, one of them continued, generated rows between them."""
    runs = [(0, 0, 150), (3, 500, 1), (1, 192, 77), (4, 33, 3), (2, 5, 9)]
    case = Case(runs, dim=dim, heads=heads, kv_heads=kv_heads, types=types)
    world = World(cuda, put, case)
    together = world.run()
    world.check(together, every=3)
    np.testing.assert_array_equal(world.run(150, 151, 1)[0], together[150])
    np.testing.assert_array_equal(world.run(228, 231, 3), together[228:231])


def test_a_prompt_has_the_same_bits_in_chunks(cuda: Any, put: Any) -> None:
    world = World(cuda, put, Case([(0, 0, 400)], dim=128, heads=8, kv_heads=2))
    whole = world.run()
    world.check(whole, every=7)
    for start, stop in [(0, 64), (64, 320), (320, 400)]:
        np.testing.assert_array_equal(world.run(start, stop, 1), whole[start:stop])


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    "more",
    [
        {"window": 1},
        {"window": 64},
        {"window": 100},
        {"window": 4096},
        {"window": 128, "softcap": 20.0},
        {"softcap": 5.0, "sharpness": 10.0},
        {"head_map": [1, 0, 1, 2, 1], "heads": 5, "kv_heads": 4},
    ],
    ids=ids,
)
def test_windows_caps_and_head_maps(cuda: Any, put: Any, dim: int, more: dict[str, Any]) -> None:
    runs = [(0, 0, 130), (2, 1500, 2), (1, 600, 100), (3, 62, 4)]
    world = World(cuda, put, Case(runs, dim=dim, **more))
    together = world.run()
    world.check(together, every=3)
    np.testing.assert_array_equal(world.run(131, 132, 1)[0], together[131])
    np.testing.assert_array_equal(world.run(232, 236, 4), together[232:])


def test_many_streams_at_long_contexts_share_scratch(cuda: Any, put: Any) -> None:
    """More rows than the pieces of one launch have room for."""
    runs = [(slot, 90 + slot, 1) for slot in range(64)]
    world = World(cuda, put, Case(runs, dim=64, heads=16, kv_heads=8))
    together = world.run(outputs=64)
    world.check(together, every=5)
    np.testing.assert_array_equal(world.run(63, 64, 1)[0], together[63])


def test_large_queries_keep_their_precision(cuda: Any, put: Any) -> None:
    """Queries beyond the range of halves, with a scale that makes up for it."""
    world = World(cuda, put, Case([(0, 200, 2), (1, 0, 40)], dim=128, sharpness=2e-6))
    world.q *= np.float32(1e6)
    world.check(world.run())


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_store_rounds_saturates_and_keeps_what_is_not_finite(
    cuda: Any, put: Any, kind: str
) -> None:
    case = Case([(0, 0, 70)], dim=64, heads=2, kv_heads=2, types=(kind, kind))
    world = World(cuda, put, case)
    k, v = world.k.copy(), world.v.copy()
    k[3, 1, 5], v[69, 0, 40] = 1e30, -1e30
    k[4, 0, 2], v[5, 1, 33] = np.nan, np.inf
    world.store(k, v, world.places)
    keys, values = world.stored()
    for stored, original in ((keys, k), (values, v)):
        places = np.array(world.places)
        ids = world.table[places[:, 0], places[:, 1] // 64]
        got = stored[ids, :, places[:, 1] % 64]
        blocks, want = got.reshape(70, 2, -1, 32), original.reshape(70, 2, -1, 32)
        is_sane = np.isfinite(want).all(-1)
        assert (~np.isfinite(blocks[~is_sane])).any(-1).all()
        clipped = np.clip(want[is_sane].astype(np.float64), -65504, 65504)
        most = np.abs(clipped).max(-1, keepdims=True)
        # half a step, and what the rounded scale cuts off at the ends
        step = {"f16": 2.0**-11 * most, "q8_0": most / 200, "q4_0": most / 7}[kind]
        assert (np.abs(blocks[is_sane] - clipped) <= step + 2.0**-24).all()


def test_copy_page(cuda: Any, put: Any) -> None:
    world = World(cuda, put, Case([(0, 0, 128)], dim=64))
    source, target = world.table[0, 0], world.table[0, 1]
    cuda.copy_page(world.cache, int(source), int(target))
    for part in pages.page_parts(world.cache):
        raw = cuda.to_host(part)
        np.testing.assert_array_equal(raw[target], raw[source])


def test_a_position_past_the_page_table_stores_nothing(cuda: Any, put: Any) -> None:
    world = World(cuda, put, Case([(0, 0, 64)], dim=64))
    before = [cuda.to_host(part) for part in pages.page_parts(world.cache)]
    world.store(world.k[:1], world.v[:1], [(0, 64 * world.width)])
    for old, part in zip(before, pages.page_parts(world.cache), strict=True):
        np.testing.assert_array_equal(cuda.to_host(part), old)


def test_a_captured_step_follows_positions(cuda: Any, put: Any) -> None:
    """The graph reads slots and positions when it runs, not when it is recorded."""
    world = World(cuda, put, Case([(0, 300, 1), (1, 9, 1)], dim=128, heads=8, kv_heads=2))
    case = world.case
    batch = world.batch(world.tokens, 2)
    q = put(world.q)
    expected = world.run()
    cuda.reset_scratch()

    def step() -> Any:
        return launcher.attention(cuda, q, world.cache, batch, 0, case.head_map, case.scale)

    step()
    cuda.upload(batch.positions, np.array([3, 4], np.int32))
    cuda.reset_scratch()
    with cuda.capture() as graph:
        y = step()
    cuda.upload(batch.positions, np.array([300, 9], np.int32))
    graph.replay()
    np.testing.assert_array_equal(cuda.to_host(y).reshape(expected.shape), expected)


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q4_0")], ids=ids)
@pytest.mark.parametrize(("layout", "pairs"), [("neox", 64), ("norm", 64), ("neox", 20)])
@pytest.mark.parametrize("is_normed", [False, True])
def test_rope_store_is_its_parts(
    cuda: Any, put: Any, is_normed: bool, layout: str, pairs: int, types: tuple[str, str]
) -> None:
    weights: tuple[Any, Any] = (None, None)
    if is_normed:
        values = np.random.default_rng(3).standard_normal(128, np.float32)
        weights = (cuda.weight(values.view(np.uint8), "F32", (128,)),) * 2
    tolerance = 1e-5 if is_normed else 0.0
    twin.check_rope_store(cuda, put, weights, layout, pairs, types, 128, tolerance)
