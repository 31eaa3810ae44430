"""Chosen experts of generated rows, and with them the shared one: kernels run on the CPU from their
own source, against the reference."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import expert_stream, experts
from voltapile.kernels.cuda.chunks import max_shared
from voltapile.kernels.cuda.expert_table import ExpertTable, Shared
from voltapile.kernels.cuda.families import shared_of
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance, Kernel
from voltapile.kernels.families import SharedExpert

from .emulated_families import EmulatedFamilies
from .emulation import has_compiler
from .test_families import REF, batch_of, device, normal, weights_of

pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no g++")
SLOW = pytest.mark.slow
STREAMED = {"expert_up_stream", "expert_down_stream", "expert_parts", "expert_join"}
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
    x[8] = 0
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
        assert {instance.function for instance, *_ in launched} <= STREAMED
    for part in (slice(2, 3), slice(9, 10), slice(8, 11), slice(1, 9)):
        np.testing.assert_array_equal(found(part), together[part])
    monkeypatch.setattr(expert_stream, "DOWN_WARPS", 2)  # each with several chunks in turn
    np.testing.assert_array_equal(found(slice(8, 11)), together[8:11])
    assert not ops.to_host(ops.tickets).any()


@pytest.mark.parametrize("other", [None, "Q4_K"])
def test_choice_is_posted(ops: Any, other: str | None) -> None:
    """From the router to both kernels, for one token; what nobody has read is no choice later."""
    if ops.arch < expert_stream.ARCH:
        pytest.skip("experts are not streamed")
    shapes = [(4, 32, 256), (4, 32, 256), (4, 256, 32)]
    names = ["Q4_K", "Q4_K", "Q8_0"]
    made = [weights_of(ops, np.zeros(each), name) for each, name in zip(shapes, names, strict=True)]
    table, truth = (
        each.expert_table(*(m[i] for m in made), 1) for i, each in enumerate((ops, REF))
    )
    shared: tuple[Any, Any] = (None, None)
    if other is not None:
        more = [weights_of(ops, np.zeros((32, 256)), other) for _ in range(2)]
        more.append(weights_of(ops, np.zeros((256, 32)), "Q8_0"))
        shared = tuple(SharedExpert(*(m[i] for m in more), None) for i in range(2))
    mine, theirs = weights_of(ops, normal(5, 6, 256))
    counts = ops.array(np.zeros((2, 6), np.int64))
    for seed in range(3):
        x, batch = normal(seed, 1, 256), batch_of([0], [0])
        routing = ops.route(ops.array(x), mine, 3, counts, device(ops, batch))
        assert ops.posts_of(routing[0]).tag > 0
        assert ops.to_host(ops.posts).any()
        if seed == 1:
            continue  # its posts stay
        expected = REF.route(x, theirs, 3, np.zeros((2, 6), np.int64), batch)
        # What is posted counts, and not what is elsewhere.
        unread = routing[0], ops.array(np.zeros((1, 3), np.float32))
        found = ops.to_host(ops.experts(ops.array(x), unread, table, None, shared[0]))
        right = REF.experts(x, expected, truth, None, shared[1])
        np.testing.assert_allclose(found, right, atol=1e-3 * np.abs(right).max())
        assert not ops.to_host(ops.posts).any()
        assert not ops.to_host(ops.tickets).any()
        without = experts.experts(ops, ops.array(x), routing, table, shared=shared_of(shared[0]))
        np.testing.assert_array_equal(ops.to_host(without), found)


@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_that_are_early(folder: Path, monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    """What they read comes while they run: the choice, then numbers, the last one last."""
    ops = EmulatedFamilies(arch, folder, max_shared(arch))
    shapes, names = [(4, 64, 256), (4, 64, 256), (4, 256, 64)], ["Q4_K", "Q4_K", "Q5_1"]
    made = [weights_of(ops, np.zeros(each), name) for each, name in zip(shapes, names, strict=True)]
    table, (router, _) = (
        ops.expert_table(*(m[0] for m in made), 1),
        weights_of(ops, normal(5, 6, 256)),
    )
    counts = ops.array(np.zeros((2, 6), np.int64))

    def step() -> np.ndarray:
        x = ops.array(normal(3, 1, 256))
        routing = ops.route(x, router, 4, counts, device(ops, batch_of([0], [0])))
        return np.array(ops.to_host(ops.experts(x, routing, table)))

    right, kernel = step(), ops.kernel

    def late(instance: Instance) -> Kernel:
        def call(*args: Any, **named: Any) -> None:
            mail = [ops.view(each).reshape(-1) for each in (ops.posts, ops.tickets)]
            whole = [each.copy() for each in mail]
            for each in mail:
                each[:] = 0
            running = threading.Thread(target=kernel(instance), args=args, kwargs=named)
            running.start()
            for each, values in zip(mail, whole, strict=True):
                for part in np.array_split(np.flatnonzero(values), 2):
                    time.sleep(0.02)
                    assert running.is_alive()
                    each[part] = values[part]
                if instance.function == "expert_up_stream":
                    break  # which writes the tickets itself
            running.join(60)
            assert not running.is_alive()

        return call if instance.function in STREAMED else kernel(instance)

    monkeypatch.setattr(ops, "kernel", late)
    np.testing.assert_array_equal(step(), right)
    assert not ops.view(ops.posts).any()
    assert not ops.view(ops.tickets).any()


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
    ring = layer.up_ring(1, 1, used, max_shared(90))
    up, down = layer.up_bytes(1, 1, ring) + 1024 + 128, layer.down_bytes(used) + 1024 + 3072
    assert 3 * up + down <= 228 << 10


def test_what_is_not_streamed() -> None:
    assert not _layer((8, 320, 256), ("Q8_0", "Q8_0")).fits(4, max_shared(90))  # rows of up
    rows = _layer((8, 256, 320), ("Q4_K", "Q8_0"))  # rows of down: whole in a block, or not at all
    assert rows.fits(4, max_shared(90))
    assert not rows.has_parts
    assert _layer((8, 256, 512), ("Q4_K", "Q8_0")).has_parts
