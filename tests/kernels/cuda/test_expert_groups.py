"""Experts of many tokens, run on the CPU from their own source: tiles of any size, every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import expert_groups
from voltapile.kernels.cuda.chunks import REPACKED, max_shared
from voltapile.kernels.reference.families import ReferenceFamilyOps

from ..test_matmul import random_raw
from .emulated_families import EmulatedFamilies
from .emulation import has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no g++")
REF = ReferenceFamilyOps()
SLOW = pytest.mark.slow
COUNTS = [0, 1, 7, 8, 9, 16, 17, 40, 64, 65, 128, 129]  # tokens of each expert
QUICK = "Q4_K", "Q5_1", "Q6_K"


@pytest.fixture(scope="module", params=[90, *(pytest.param(n, marks=SLOW) for n in (70, 75, 80))])
def ops(request: pytest.FixtureRequest, folder: Path) -> Any:
    return EmulatedFamilies(request.param, folder, max_shared(request.param))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def sizes_of(name: str) -> tuple[int, int]:
    """Width and inner width: odd numbers of groups where the format has them."""
    if name == "NVFP4_SCALED":
        return 192, 320
    return (256, 512) if name.endswith(("_K", "_XS")) else (96, 288)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else SLOW) for n in expert_groups.FORMATS]
)
def test_tiles_of_any_size(ops: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A token's bits depend neither on how many others its expert has nor on their order."""
    width, inner = sizes_of(name)
    experts, tokens = len(COUNTS), sum(COUNTS)
    shapes = (experts, inner, width), (experts, inner, width), (experts, width, inner)
    raws = [random_raw(name, each * rows, columns, rows) for each, rows, columns in shapes]
    x, ones = normal(7, tokens, width), np.ones((tokens, 1), np.float32)
    chosen = np.repeat(np.arange(experts, dtype=np.int32), COUNTS)[:, None]
    monkeypatch.setattr(ops, "alone", 0)

    def table_of(on: Any) -> Any:
        return on.expert_table(
            *(on.weight(raw.reshape(-1), name, s) for raw, s in zip(raws, shapes, strict=True)), 0
        )

    table = table_of(ops)

    def found(order: np.ndarray) -> np.ndarray:
        routing = ops.array(chosen[order]), ops.array(ones[order])
        return ops.to_host(ops.experts(ops.array(x[order]), routing, table))

    together = found(np.arange(tokens))
    if name not in REPACKED.values():  # of which the reference knows nothing
        expected = REF.experts(x, (chosen, ones), table_of(REF))
        np.testing.assert_allclose(together, expected, atol=2e-3 * np.abs(expected).max())
    some = np.random.default_rng(1).permutation(tokens)[:150]
    np.testing.assert_array_equal(found(some), together[some])
    monkeypatch.setattr(expert_groups, "FEW", 0)
    np.testing.assert_array_equal(found(np.arange(tokens)), together)


def test_both_kinds_are_taken(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles of rows a warp, where experts have few tokens and blocks much shared memory."""
    width, name = 96, "Q4_0"
    shapes = (2, 96, width), (2, 96, width), (2, width, 96)
    weights = [ops.weight(random_raw(name, 2 * n, k, 0).reshape(-1), name, (e, n, k))
               for e, n, k in shapes]  # fmt: skip
    table = ops.expert_table(*weights, 0)
    monkeypatch.setattr(ops, "alone", 0)
    for tokens in (40, 130):
        ops.launched.clear()
        routing = ops.zeros((tokens, 1), np.int32), ops.array(np.ones((tokens, 1), np.float32))
        ops.experts(ops.array(normal(1, tokens, width)), routing, table)
        kinds = {
            dict(each.defines)["TILES"] for each, *_ in ops.launched if each.function[-2:] == "up"
        }
        assert kinds == {"2" if ops.arch == 90 and tokens == 40 else "1"}
