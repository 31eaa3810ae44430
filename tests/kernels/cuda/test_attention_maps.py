"""Attention's own sources, run on the CPU for three architectures, against float64 numpy.

Proves register maps, shared memory, page walks, masks and the order of pieces; not the compiler's
machine code, speed, or Volta's truncating sums (tests/gpu runs the same comparison on a device).
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import attention as launcher
from voltapile.kernels.cuda import pages
from voltapile.kernels.cuda.launch import DeviceArray

HERE = Path(__file__).parent


def load(name: str) -> ModuleType:
    """A module beside this one."""
    spec = importlib.util.spec_from_file_location(f"cuda_tests_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


emulation, twin = load("emulation"), load("attention_twin")
Case, World = twin.Case, twin.World

pytestmark = pytest.mark.skipif(not emulation.has_compiler(), reason="no g++ here")


class Emulated(emulation.EmulatedOps):  # type: ignore[misc, name-defined]
    def upload(self, target: DeviceArray, values: np.ndarray) -> None:
        raw = np.ascontiguousarray(values)
        ctypes.memmove(target.ptr, raw.ctypes.data, raw.nbytes)


@pytest.fixture(scope="module")
def ops_for(folder: Path) -> Callable[[int], Any]:
    shared = {70: 96 << 10, 75: 64 << 10, 80: 160 << 10, 90: 227 << 10}
    return lambda arch: Emulated(arch, folder, shared[arch])


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch has room for the pieces of more than one token or item."""
    monkeypatch.setattr(launcher, "PARTIAL_BYTES", 1)


@pytest.fixture
def whole_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block takes a piece alone: the CPU has no clusters."""
    monkeypatch.setattr(launcher, "_blocks", lambda *_: 1)


ARCHS = [70, pytest.param(75, marks=pytest.mark.slow), 80]


@pytest.mark.parametrize("arch", ARCHS)
def test_generated_rows(ops_for: Callable[[int], Any], arch: int) -> None:
    """Several pieces, a verify run across a page's end, bits alone and in company."""
    ops = ops_for(arch)
    world = World(ops, ops.array, Case([(0, 126, 4), (1, 5, 1)]))
    together = world.run()
    world.check(together)
    for i in (0, 3, 4):
        alone = world.run(i, i + 1, 1)
        np.testing.assert_array_equal(alone[0], together[i])


@pytest.mark.usefixtures("whole_pieces")
@pytest.mark.parametrize(
    "types",
    [("f16", "f16"), pytest.param(("q8_0", "q8_0"), marks=pytest.mark.slow)],
    ids=str,
)
def test_shares_of_a_piece(ops_for: Callable[[int], Any], types: tuple[str, str]) -> None:
    """A block takes the shares of a piece in turn: some with one step, some with two, some none."""
    ops = ops_for(90)
    for window in (0, 300):
        runs = [(0, 598, 2), (1, 5, 1), (2, 1100, 1)]
        world = World(ops, ops.array, Case(runs, types=types, window=window))
        together = world.run()
        world.check(together)
        for i in range(4):
            np.testing.assert_array_equal(world.run(i, i + 1, 1)[0], together[i])


@pytest.mark.parametrize("case", [
    Case([(0, 290, 1)], heads=11, kv_heads=1),  # seven blocks; the second half of the rows
    Case([(0, 2100, 1)], heads=1, kv_heads=1, window=2080),  # two pieces behind a window
    Case([(0, 2199, 2)], heads=5, kv_heads=1, types=("q8_0", "q8_0")),  # three, the last of few
], ids=["few", "behind", "pieces"])  # fmt: skip
def test_a_cluster_gives_the_bits_of_one_block(
    ops_for: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch, case: Any
) -> None:
    ops = ops_for(90)
    world = World(ops, ops.array, case)
    together = world.run()
    world.check(together)
    monkeypatch.setattr(launcher, "_blocks", lambda *_: 1)
    np.testing.assert_array_equal(world.run(), together)


@pytest.mark.parametrize("arch", ARCHS)
def test_prompt_rows(ops_for: Callable[[int], Any], arch: int) -> None:
    """A mixed step: two prompts of which one goes on, a generated row between them."""
    ops = ops_for(arch)
    runs = [(0, 0, 33), (2, 70, 1), (1, 64, 40)]
    world = World(ops, ops.array, Case(runs, heads=3, kv_heads=1))
    together = world.run()
    world.check(together)
    np.testing.assert_array_equal(world.run(33, 34, 1)[0], together[33])


WIDTHS = [
    {"dim": 80, "heads": 2, "kv_heads": 2},
    {"dim": 96, "heads": 12, "kv_heads": 1},
    {"dim": 128, "heads": 8, "kv_heads": 1, "types": ("q8_0", "q8_0")},
    {"dim": 256, "heads": 6, "kv_heads": 1},
    {"dim": 256, "heads": 2, "kv_heads": 1, "types": ("q8_0", "q8_0")},
    {"dim": 40, "value_dim": 24, "heads": 3, "kv_heads": 3},
    {"dim": 64, "heads": 2, "kv_heads": 1, "types": ("q8_0", "q4_0")},
    {"dim": 160, "heads": 2, "kv_heads": 1, "types": ("q4_0", "f16")},
]


@pytest.mark.slow
@pytest.mark.parametrize("arch", [*ARCHS, 90])
@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_widths_and_types(ops_for: Callable[[int], Any], arch: int, width: dict[str, Any]) -> None:
    world = World(ops_for(arch), ops_for(arch).array, Case([(0, 66, 2), (1, 0, 12)], **width))
    world.check(world.run())


@pytest.mark.parametrize(
    "more",
    [
        {"window": 40},
        {"window": 100, "softcap": 5.0},
        {"head_map": [1, 0, 1, 2, 1], "heads": 5, "kv_heads": 4},
        {"softcap": 3.0, "sharpness": 20.0},
    ],
    ids=str,
)
def test_windows_caps_and_head_maps(ops_for: Callable[[int], Any], more: dict[str, Any]) -> None:
    ops = ops_for(80)
    world = World(ops, ops.array, Case([(1, 190, 2), (0, 0, 14), (2, 60, 10)], **more))
    together = world.run()
    world.check(together)
    np.testing.assert_array_equal(world.run(1, 2, 1)[0], together[1])


@pytest.mark.usefixtures("few_bytes")
def test_many_launches_give_the_same(ops_for: Callable[[int], Any]) -> None:
    ops = ops_for(80)
    for runs in ([(0, 126, 4), (1, 5, 1)], [(0, 64, 12), (1, 60, 5), (2, 0, 1)]):
        world = World(ops, ops.array, Case(runs))
        together = world.run()
        world.check(together)
        np.testing.assert_array_equal(world.run(len(together) - 1, None, 1)[0], together[-1])


@pytest.mark.parametrize("wide", [2, 4, 5, 6, 8, 10, 12, 16, 32])
def test_eight_rows_have_a_piece_in_eight_banks(wide: int) -> None:
    """Of rows as pages have them from sm_80 on: ldmatrix reads a piece of eight at once."""
    pieces = np.tile(np.repeat(np.arange(wide, dtype=np.uint8), 16), (twin.PAGE, 1))
    places = np.argsort(twin.turned(pieces, 80)[:, ::16], axis=1)  # [row, piece]
    banks = (places + wide * np.arange(twin.PAGE)[:, None]) % 8
    for first in range(0, twin.PAGE, 8):
        assert (np.sort(banks[first : first + 8], axis=0) == np.arange(8)[:, None]).all()


def test_prompt_kernels_fit_cards_with_little_shared_memory() -> None:
    for dim in launcher.HEAD_DIMS:
        cache = pages.CudaKv(None, None, None, 1, 1, dim, dim, "f16", "f16")  # type: ignore[arg-type]
        for arch, most in ((70, 96), (75, 64), (80, 163), (86, 99), (89, 99), (90, 227)):
            shape = launcher.prefill_shape(cache, arch)
            assert launcher.prefill_shared(*shape, arch) <= most << 10, (dim, arch)
            own = launcher.shape_of(cache)
            for tiles in launcher.row_tiles(*own):
                assert launcher.decode_shared(*own, tiles, arch) <= most << 10, (dim, arch)


@pytest.mark.parametrize("norms", [(False, False), (True, True), (False, True)], ids=str)
@pytest.mark.parametrize(
    ("layout", "pairs", "dim", "types"),
    [
        ("neox", 32, 64, ("f16", "f16")),
        ("norm", 20, 64, ("q8_0", "q4_0")),
        ("neox", 30, 80, ("f16", "f16")),
        ("norm", 128, 256, ("f16", "q8_0")),
    ],
)
def test_rope_store_is_its_parts(
    ops_for: Callable[[int], Any],
    layout: str,
    pairs: int,
    dim: int,
    types: tuple[str, str],
    norms: tuple[bool, bool],
) -> None:
    ops = ops_for(70)
    values = np.random.default_rng(3).standard_normal((2, dim), np.float32)
    weights = tuple(
        ops.weight(each, "F32", (dim,)) if is_there else None
        for each, is_there in zip(values, norms, strict=True)
    )
    twin.check_rope_store(ops, ops.array, weights, layout, pairs, types, dim)
