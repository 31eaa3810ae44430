"""Products that send what they make to other ranks: the bits of a sum that sends it, and when they
are launched (test_collectives.py has the names alone)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import group, matmul, stream
from voltapile.kernels.cuda.collectives import CudaCollectives
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance
from voltapile.kernels.cuda.links import Links
from voltapile.kernels.cuda.pushing import can_send, product_of

from ..test_matmul import random_raw
from .emulation import EmulatedOps, has_compiler
from .test_group import Stage, check, one_island, parts_of, vector_of


@pytest.fixture(scope="module")
def pushing(folder: Path) -> EmulatedOps:
    if not has_compiler():
        pytest.skip("there is no g++")
    ops = EmulatedOps(90, folder, 227 << 10)
    ops.kernel(group.SUM_NORM)
    for name in ("Q8_0", "Q4_K"):
        kind = stream.STREAM[(name, name), stream.TEAMS]
        ops.kernel(kind)
        ops.kernel(stream.PUSHING[kind])
    return ops


@pytest.mark.parametrize(("type_name", "tokens"), [("Q8_0", 1), ("Q8_0", 8), ("Q4_K", 3)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_product_sends_its_part_itself(
    pushing: EmulatedOps, type_name: str, tokens: int, ranks: int
) -> None:
    n, k = 784, 512
    shape, gain = (tokens, n), parts_of(7, 1, n)[0]
    bias = parts_of(8, 1, n)[0]

    def work(ops: EmulatedOps, links: Links, rank: int) -> list[np.ndarray]:
        raw, found = random_raw(type_name, n, k, rank), []
        weight, norm = ops.weight(raw, type_name, (n, k)), vector_of(ops, gain)
        mine = vector_of(ops, bias) if rank == 0 else None
        for round in range(3):
            time.sleep(((rank + round) % 3) * 0.01)
            inner = ops.array(parts_of(round, ranks, tokens, k)[rank])
            for is_pushed in (True, False):
                x, out = ops.array(parts_of(50, 1, *shape)[0]), ops.scratch(shape)
                assert can_send(ops, inner, weight)
                product = product_of(ops, inner, weight, mine)
                product.launch(group.line_of(links) if is_pushed else ())
                group.all_reduce_norm(ops, links, product.sums, x, norm, 1e-6, out, is_pushed)
                found += [ops.to_host(x), ops.to_host(out)]
        return found

    first, *others = Stage(pushing, one_island(ranks), frozenset({(0, 2)}), start=-2).run(work)
    check(others, first)
    for i in range(0, len(first), 4):
        check([first[i : i + 2]], first[i + 2 : i + 4])


class Ranked(CudaCollectives, EmulatedOps):
    """What a model's layers ask for, and kernels that run."""

    def _launcher(self) -> EmulatedOps:
        return self

    def kernel(self, instance: Instance) -> Any:
        self._catch_up()
        return super().kernel(instance)

    def linear(self, x: DeviceArray, weight: CudaWeight) -> DeviceArray:
        late = self._product_late(x, weight, None, False)
        return matmul.linear(self, x, weight) if late is None else late


@pytest.mark.parametrize("tokens", [1, 3])
def test_layers_of_ranks(pushing: EmulatedOps, folder: Path, tokens: int) -> None:
    """Their bits do not depend on who sends what, nor on what is launched together."""
    n, k, layers = 768, 256, 3
    ranked = Ranked(90, folder, 227 << 10)

    def work(_: EmulatedOps, links: Links, rank: int) -> list[np.ndarray]:
        ops, found = ranked, []
        ops._links = links
        into = [
            ops.weight(random_raw("Q8_0", n, k, 9 * i + rank), "Q8_0", (n, k)) for i in range(3)
        ]
        inner = [
            ops.weight(random_raw("Q8_0", k, n, 5 * i + rank), "Q8_0", (k, n)) for i in range(3)
        ]
        gain = vector_of(ops, parts_of(7, 1, n)[0])
        for links.norms, links.pushes in ((True, True), (True, False), (False, False)):
            x = ops.array(parts_of(50, 1, tokens, n)[0])
            ops.launched.clear()
            for layer in range(layers):
                h = ops.rms_norm(x, gain, 1e-6)
                ops.all_reduce(ops.linear(ops.linear(h, inner[layer]), into[layer]), x.shape, x)
            out = ops.rms_norm(x, gain, 1e-6)
            ops._catch_up()
            found += [ops.to_host(x), ops.to_host(out)]
            names = [instance.name for instance, *_ in ops.launched]
            assert sum("PUSH" in name for name in names) == (layers if links.pushes else 0), names
            assert sum("group_sum_norm" in name for name in names) == (layers if links.norms else 0)
        return found

    first, other = Stage(pushing, one_island(2)).run(work)
    check([other], first)
    for i in (2, 4):
        check([first[i : i + 2]], first[:2])
