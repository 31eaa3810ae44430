"""Products that send what they make to other ranks: the bits of a sum that sends it, and when they
are launched (test_collectives.py has the names alone)."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import expert_stream, group, matmul, stream
from voltapile.kernels.cuda.collectives import CudaCollectives
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance
from voltapile.kernels.cuda.links import Islands, Links
from voltapile.kernels.cuda.pushing import can_send, product_of

from ..test_matmul import random_raw
from .emulated_families import EmulatedFamilies
from .emulation import EmulatedOps, has_compiler
from .test_group import Stage, check, one_island, parts_of, vector_of


@pytest.fixture(scope="module")
def pushing(folder: Path) -> EmulatedOps:
    if not has_compiler():
        pytest.skip("there is no g++")
    ops = EmulatedOps(90, folder, 227 << 10)
    for each in (group.SUM, group.SUM_NORM):
        ops.kernel(each)
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


@pytest.mark.parametrize(("tokens", "ranks"), [(1, 2), (3, 3)])
def test_a_sum_of_what_was_sent_without_a_norm(
    pushing: EmulatedOps, tokens: int, ranks: int
) -> None:
    """The bits of a sum of any other kind."""
    n, k = 768, 256
    shape = tokens, n

    def work(ops: EmulatedOps, links: Links, rank: int) -> list[np.ndarray]:
        weight, found = ops.weight(random_raw("Q8_0", n, k, rank), "Q8_0", (n, k)), []
        inner = ops.array(parts_of(2, ranks, tokens, k)[rank])
        for adds in (True, False):
            for is_sent in (True, rank == 0, None):  # a rank may have nothing that can send
                x = ops.array(parts_of(50, 1, *shape)[0])
                product = product_of(ops, inner, weight, None)
                product.launch(group.line_of(links) if is_sent else ())
                if is_sent is None:
                    group.all_reduce(ops, links, product.sums, x, adds)
                else:
                    group.all_reduce_fours(ops, links, product.sums, x, adds, is_sent)
                found.append(ops.to_host(x))
        return found

    first, *others = Stage(pushing, one_island(ranks), start=-2).run(work)
    check(others, first)
    for i in (0, 3):
        assert first[i].tobytes() == first[i + 1].tobytes() == first[i + 2].tobytes()


@pytest.fixture(scope="module")
def experts(folder: Path) -> EmulatedFamilies:
    if not has_compiler():
        pytest.skip("there is no g++")
    ops = EmulatedFamilies(90, folder, 227 << 10)
    ops.kernel(group.SUM_NORM)
    kind = expert_stream.DOWN[("Q8_0", "Q8_0"), True]
    for each in (kind, expert_stream.PUSHING[kind], expert_stream.UP[("Q8_0", "Q8_0"), True]):
        ops.kernel(each)
    return ops


@pytest.mark.parametrize(("tokens", "ranks"), [(1, 2), (5, 3)])
def test_chosen_experts_send_their_part(experts: EmulatedFamilies, tokens: int, ranks: int) -> None:
    """A rank that has none of a token's experts sends zeros."""
    n, inner, own, used, eps = 768, 256, 2, 3, 1e-6
    rng = np.random.default_rng(4)
    chosen = np.stack([rng.permutation(own * ranks)[:used] for _ in range(tokens)])
    chosen[-1] = [0, 1, 1]
    shares, gain = rng.random((tokens, used)).astype(np.float32), parts_of(7, 1, n)[0]

    def work(ops: EmulatedOps, links: Links, rank: int) -> list[np.ndarray]:
        shapes = [(own, inner, n), (own, inner, n), (own, n, inner)]
        raws = [random_raw("Q8_0", each[0] * each[1], each[2], rank + 7 * i)
                for i, each in enumerate(shapes)]  # fmt: skip
        made = (ops.weight(raw, "Q8_0", each) for raw, each in zip(raws, shapes, strict=True))
        table = experts.expert_table(*made, own * rank)
        routing = ops.array(chosen.astype(np.int32)), ops.array(shares)
        h, norm = ops.array(parts_of(9, 1, tokens, n)[0] * 1e-3), vector_of(ops, gain)
        found = []
        for _ in range(2):
            for is_pushed in (True, False):
                x, out, part = (
                    ops.array(parts_of(5, 1, tokens, n)[0]),
                    *(ops.scratch((tokens, n)) for _ in range(2)),
                )
                end = expert_stream.begun(ops, h, routing, table, None)
                assert end is not None
                end(part, False, group.line_of(links) if is_pushed else (), False)
                group.all_reduce_norm(ops, links, part, x, norm, eps, out, is_pushed)
                found += [ops.to_host(x), ops.to_host(out)]
        return found

    first, *others = Stage(experts, one_island(ranks), start=-2).run(work)
    check(others, first)
    for i in range(2, len(first), 2):
        check([first[i : i + 2]], first[:2])
    assert np.isfinite(first[0]).all()
    assert (first[0] != parts_of(5, 1, tokens, n)[0]).mean() > 0.9


def test_many_tokens_do_not_send(experts: EmulatedFamilies) -> None:
    x = experts.scratch((expert_stream.FEW + 1, 768))
    routing = experts.scratch((len(x), 2), np.int32), experts.scratch((len(x), 2))
    nothing: Any = None
    assert expert_stream.begun(experts, x, routing, nothing, None) is None


def test_experts_end_with_the_sum_that_they_are_a_part_of(
    fake_cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, loaded = fake_cupy.Gpu(), list[str]()
    fake_cupy.install(monkeypatch, gpu)
    loader = importlib.import_module("voltapile.kernels.cuda.loader")
    monkeypatch.setattr(
        loader, "compile_instance", lambda each, *_: loaded.append(each.name) or b""
    )
    ops = importlib.import_module("voltapile.kernels.cuda.family_ops").CudaFamilyOps(0, 1 << 20)
    ops.arch, shape = 90, (1, 768)
    links = Links(1, 0, 2, Islands(((0, 1),)), np.zeros(2, np.uint32))
    ops._links, links.norms = links, True
    table = ops.expert_table(
        *(ops.dummy_weight("Q8_0", each) for each in [(2, 256, 768)] * 2 + [(2, 768, 256)]), 0
    )
    gain, x, h = ops.dummy_weight("F32", (768,)), ops.scratch(shape), ops.scratch(shape)
    routing = ops.scratch((1, 2), np.int32), ops.scratch((1, 2))
    up_down = ["expert_up_stream", "expert_down_stream"]
    for links.pushes, then in ((False, None), (True, None), (True, h)):
        gpu.launches.clear()
        loaded.clear()
        part = ops.experts(h, routing, table)
        ops.all_reduce(part, shape, x)
        if then is None:
            ops.rms_norm(x, gain, 1e-6)
        else:
            ops.all_gather(then, 1, [768] * 2)
        ends = ["group_sum_norm"] if then is None else ["group_sum_norm", "group_gather"]
        assert gpu.launches == up_down + ends
        assert any("PUSH" in name for name in loaded) == (links.pushes and then is None)


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


MODES = [(True, True, False), (True, False, False), (False, False, False), (True, True, True)]


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
        for links.norms, links.pushes, links.tails in MODES:
            x = ops.array(parts_of(50, 1, tokens, n)[0])
            ops.launched.clear()
            for layer in range(layers):
                h = ops.rms_norm(x, gain, 1e-6)
                ops.all_reduce(ops.linear(ops.linear(h, inner[layer]), into[layer]), x.shape, x)
            out = ops.rms_norm(x, gain, 1e-6)
            ops._catch_up()
            found += [ops.to_host(x), ops.to_host(out)]
            names = [instance.name for instance, *_ in ops.launched]
            kinds = "PUSH=1", "TAIL=1", "group_sum_norm", "rms_norm_rows"
            counts = [sum(kind in name for name in names) for kind in kinds]
            if links.tails:
                assert counts == [0, layers, 0, 1], names
            else:
                assert counts[:3] == [layers * links.pushes, 0, layers * links.norms], names
        return found

    first, other = Stage(pushing, one_island(2)).run(work)
    check([other], first)
    for i in (2, 4, 6):
        check([first[i : i + 2]], first[:2])
