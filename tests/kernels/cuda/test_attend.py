"""Attention that norms, rotates and stores by the way, against rope_store before it: the same bits.

The kernels' sources run on the CPU (emulation.py). And what is late comes before anything else.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import attention as launcher
from voltapile.kernels.cuda import heads, pages
from voltapile.kernels.cuda.attend import CudaAttention
from voltapile.kernels.cuda.launch import Instance, Kernel

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


class Emulated(CudaAttention, emulation.EmulatedOps):  # type: ignore[misc, name-defined]
    def kernel(self, instance: Instance) -> Kernel:
        self._catch_up()
        kernel: Kernel = super().kernel(instance)
        return kernel

    def upload(self, target: Any, values: np.ndarray) -> None:
        raw = np.ascontiguousarray(values)
        emulation.ctypes.memmove(target.ptr, raw.ctypes.data, raw.nbytes)

    def _launcher(self) -> Any:
        return self


@pytest.fixture(scope="module")
def ops_for(folder: Path) -> Callable[[int], Any]:
    shared = {80: 160 << 10, 90: 227 << 10}
    return lambda arch: Emulated(arch, folder, shared[arch])


def functions(ops: Any) -> list[str]:
    return [instance.function for instance, _, _ in ops.launched if instance != pages.STORE]


CASES = [
    (Case([(0, 512, 1)], heads=4, kv_heads=1, dim=64), "neox", 32),  # the first position of a page
    (Case([(0, 60, 7), (1, 0, 1)], heads=6, kv_heads=2, dim=64), "norm", 20),  # across pages, items
    (Case([(2, 1030, 2)], heads=3, kv_heads=1, dim=80, window=40), "neox", 40),
    (Case([(0, 290, 1)], heads=8, kv_heads=1, dim=128, types=("q8_0", "q8_0")), "neox", 64),
    (Case([(0, 2046, 4)], heads=2, kv_heads=1, dim=64, types=("q8_0", "q8_0")), "neox", 32),
    (Case([(0, 70, 1)], heads=8, kv_heads=1, dim=256), "neox", 32),
]


@pytest.mark.parametrize("blocks", [8, 1])
@pytest.mark.parametrize(("case", "layout", "pairs"), CASES, ids=range(len(CASES)))
def test_raw_heads(
    ops_for: Callable[[int], Any],
    monkeypatch: pytest.MonkeyPatch,
    case: Any,
    layout: str,
    pairs: int,
    blocks: int,
) -> None:
    if blocks == 1:  # where there is such a kernel
        monkeypatch.setattr(launcher, "MANY_PIECES", 1)
    ops = ops_for(90)
    ops.launched.clear()
    fused = twin.attend_raw(ops, ops.array, case, layout, pairs)
    assert functions(ops) == ["attention_decode"]
    monkeypatch.setattr(launcher, "takes_raw", lambda *_: False)
    apart = twin.attend_raw(ops, ops.array, case, layout, pairs)
    assert functions(ops)[-2:] == ["rope_store", "attention_decode"]
    for ours, theirs in zip(fused, apart, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("arch", "case", "outputs"),
    [
        (80, Case([(0, 5, 1)]), 1),
        (90, Case([(0, 5, 12)]), 1),  # a prompt
        (90, Case([(0, 5, 1)], types=("q4_0", "f16")), 1),
        (90, Case([(0, 5, 1)], heads=2, kv_heads=3, head_map=[0, 2]), 1),  # a KV head of nobody's
    ],
    ids=["arch", "prompt", "types", "heads"],
)
def test_who_does_not_take_raw_heads(
    ops_for: Callable[[int], Any], arch: int, case: Any, outputs: int
) -> None:
    ops = ops_for(arch)
    world = World(ops, ops.array, case)
    batch = world.batch(world.tokens, outputs)
    assert not launcher.takes_raw(ops, world.cache, batch, case.head_map, 0.0)


def test_what_is_late_comes_before_anything_else(ops_for: Callable[[int], Any]) -> None:
    ops = ops_for(90)
    case = Case([(0, 5, 1)], heads=2, kv_heads=1)
    world = World(ops, ops.array, case)
    batch = world.batch(world.tokens, 1)
    arrays = [ops.array(np.zeros((1, n * 64), np.float32)) for n in (2, 1, 1)]
    q = ops.rope_store(
        *arrays, ops.array(np.zeros((1, 32, 2), np.float32)), "neox", world.cache, batch, 0
    )
    ops.launched.clear()
    other = world.batch(world.tokens, 1)  # not the one that was stored
    ops.attention(q, world.cache, other, 0, case.head_map, case.scale)
    assert functions(ops) == [heads.ROPE_STORE[128].function, "attention_decode"]
