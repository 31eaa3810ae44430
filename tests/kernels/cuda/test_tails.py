"""Sums over ranks that products make in their tail: the bits of a sum of any other kind."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import expert_stream, group, matmul, stream
from voltapile.kernels.cuda.chunks import max_shared
from voltapile.kernels.cuda.collectives import CudaCollectives
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Instance
from voltapile.kernels.cuda.links import FLAGS_AT, ROOM, TAILS_AT, Islands, Links
from voltapile.kernels.cuda.norms import late_norm
from voltapile.kernels.cuda.tails import can_end, product_of
from voltapile.kernels.group import GroupError

from ..test_matmul import random_raw
from .emulated_families import EmulatedFamilies
from .emulation import EmulatedOps, has_compiler
from .test_group import Stage, check, one_island, parts_of, vector_of

# Each compiles some twenty kernels of its own.
ARCHS = [90, pytest.param(80, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=ARCHS)
def tailing(folder: Path, request: pytest.FixtureRequest) -> EmulatedOps:
    if not has_compiler():
        pytest.skip("there is no g++")
    ops = EmulatedOps(request.param, folder, max_shared(request.param))
    for each in (group.SUM, group.SUM_NORM, group.TAIL):
        ops.kernel(each)
    for name in ("Q8_0", "Q4_K"):
        for kind in (stream.STREAM[(name, name), stream.TEAMS], stream.BROAD[name, name]):
            for each in (kind, stream.ALONE[kind]):
                ops.kernel(each)
                ops.kernel(stream.TAILS[each])
    return ops


@pytest.fixture(autouse=True)
def _one_block(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of a sum of what lies in memory: blocks are emulated one after the other."""
    monkeypatch.setattr(group, "TAIL_BLOCKS", 1)
    return


def is_empty(stage: Stage) -> bool:
    rooms = stage.memory[:-4096].reshape(-1, ROOM)
    return not rooms[:, TAILS_AT:FLAGS_AT].any()


@pytest.mark.parametrize(
    ("type_name", "tokens", "n", "k", "ranks"),
    [
        ("Q8_0", 1, 1024, 512, 2),  # several units of each team, one of them cut short
        ("Q8_0", 8, 272, 512, 3),
        ("Q4_K", 3, 144, 512, 2),
        ("Q4_K", 1, 144, 2560, 6),  # one broad team
        ("Q8_0", 3, 112, 2304, 3),
    ],
)
def test_a_product_makes_the_sum_of_its_parts(
    tailing: EmulatedOps, type_name: str, tokens: int, n: int, k: int, ranks: int
) -> None:
    shape = tokens, n
    bias = parts_of(8, 1, n)[0]

    def work(ops: EmulatedOps, links: Links, rank: int) -> list[np.ndarray]:
        weight, found = ops.weight(random_raw(type_name, n, k, rank), type_name, (n, k)), []
        mine = vector_of(ops, bias) if rank == 0 else None
        for round in range(6):
            time.sleep(((rank + round) % 3) * 0.01)
            inner = ops.array(parts_of(round, ranks, tokens, k)[rank])
            adds = round != 3
            x, expected = (ops.array(parts_of(50, 1, *shape)[0]) for _ in range(2))
            assert can_end(ops, inner, weight)
            product = product_of(ops, inner, weight, mine)
            if (round + rank) % 5 == 4:  # of what lies in memory, beside products
                product.launch(product.sums, False, ())
                group.all_reduce_tail(ops, links, product.sums, x, adds)
            elif (round + rank) % 5 == 2 and adds and tokens == 1 and n > 512:
                product.launch(product.sums, False, ())
                gain, out = vector_of(ops, np.ones(n, np.float32)), ops.scratch(shape)
                group.all_reduce_norm(ops, links, product.sums, x, gain, 1e-6, out)
            else:
                product.launch(x, adds, group.line_of(links))
                product.launch(product.sums, False, ())
            group.all_reduce(ops, links, product.sums, expected, adds)
            found += [ops.to_host(x), ops.to_host(expected)]
        return found

    stage = Stage(tailing, one_island(ranks), frozenset({(0, 2)}), start=-3)
    first, *others = stage.run(work)
    check([first, *others], first)
    for i in range(0, len(first), 2):
        assert first[i].tobytes() == first[i + 1].tobytes(), i
    assert is_empty(stage)


@pytest.mark.parametrize(("tokens", "n"), [(1, 16), (3, 4112), (8, 8192)])
def test_a_sum_of_what_lies_in_memory(tailing: EmulatedOps, tokens: int, n: int) -> None:
    shape, ranks = (tokens, n), 3

    def work(ops: EmulatedOps, links: Links, rank: int) -> list[np.ndarray]:
        found = []
        for round in range(5):
            part = ops.array(parts_of(round, ranks, *shape)[rank])
            x = ops.array(parts_of(50, 1, *shape)[0])
            group.all_reduce_tail(ops, links, None if rank == 1 else part, x, round > 0)
            found.append(ops.to_host(x))
        return found

    expected = []
    for round in range(5):
        parts = parts_of(round, ranks, *shape)
        x = parts[0] + np.float32(0) + parts[2]
        expected.append(parts_of(50, 1, *shape)[0] + x if round else x)
    stage = Stage(tailing, one_island(ranks), start=-2)
    check(stage.run(work), expected)
    assert is_empty(stage)


@pytest.fixture(scope="module", params=ARCHS)
def experts(folder: Path, request: pytest.FixtureRequest) -> EmulatedFamilies:
    if not has_compiler():
        pytest.skip("there is no g++")
    ops = EmulatedFamilies(request.param, folder, max_shared(request.param))
    kind = expert_stream.DOWN[("Q8_0", "Q8_0"), True]
    for each in (group.SUM, group.TAIL, kind, expert_stream.TAILS[kind]):
        ops.kernel(each)
    ops.kernel(expert_stream.UP[("Q8_0", "Q8_0"), True])
    return ops


@pytest.mark.parametrize(("tokens", "ranks"), [(1, 2), (5, 3)])
def test_chosen_experts_make_the_sum_of_their_parts(
    experts: EmulatedFamilies, tokens: int, ranks: int
) -> None:
    """A rank that has none of a token's experts sends zeros; one whose part lies in memory that."""
    n, inner, own, used = 768, 256, 2, 3
    rng = np.random.default_rng(4)
    chosen = np.stack([rng.permutation(own * ranks)[:used] for _ in range(tokens)])
    chosen[-1] = [0, 1, 1]
    shares = rng.random((tokens, used)).astype(np.float32)

    def work(ops: EmulatedOps, links: Links, rank: int) -> list[np.ndarray]:
        shapes = [(own, inner, n), (own, inner, n), (own, n, inner)]
        raws = [random_raw("Q8_0", each[0] * each[1], each[2], rank + 7 * i)
                for i, each in enumerate(shapes)]  # fmt: skip
        made = (ops.weight(raw, "Q8_0", each) for raw, each in zip(raws, shapes, strict=True))
        table = experts.expert_table(*made, own * rank)
        routing = ops.array(chosen.astype(np.int32)), ops.array(shares)
        h, found = ops.array(parts_of(9, 1, tokens, n)[0] * 1e-3), []
        for round in range(5):
            adds = round != 2
            x, expected = (ops.array(parts_of(5, 1, tokens, n)[0]) for _ in range(2))
            part = ops.scratch((tokens, n))
            end = expert_stream.begun(ops, h, routing, table, None)
            assert end is not None
            end(part, False, ())
            if (round + rank) % 4 == 3:
                group.all_reduce_tail(ops, links, part, x, adds)
            else:
                end(x, adds, group.line_of(links))
            group.all_reduce(ops, links, part, expected, adds)
            found += [ops.to_host(x), ops.to_host(expected)]
        return found

    stage = Stage(experts, one_island(ranks), start=-2)
    first, *others = stage.run(work)
    check([first, *others], first)
    for i in range(0, len(first), 2):
        assert first[i].tobytes() == first[i + 1].tobytes(), i
    assert np.isfinite(first[0]).all()
    assert is_empty(stage)


def test_many_tokens_do_not_end_so(experts: EmulatedFamilies) -> None:
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
    ops._links = links
    table = ops.expert_table(
        *(ops.dummy_weight("Q8_0", each) for each in [(2, 256, 768)] * 2 + [(2, 768, 256)]), 0
    )
    gain, x, h = ops.dummy_weight("F32", (768,)), ops.scratch(shape), ops.scratch(shape)
    routing = ops.scratch((1, 2), np.int32), ops.scratch((1, 2))
    up_down = ["expert_up_stream", "expert_down_stream"]
    for links.tails, add_to in ((False, x), (True, x), (True, None)):
        gpu.launches.clear()
        loaded.clear()
        part = ops.experts(h, routing, table)
        found = ops.all_reduce(part, shape, add_to)
        assert (found.ptr == part.ptr) == (add_to is None)
        assert late_norm(ops.rms_norm(found, gain, 1e-6)) is not None
        assert gpu.launches == [*up_down, *([] if links.tails else ["group_sum"])]
        assert any("TAIL" in name for name in loaded) == (links.tails and add_to is not None)


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


MODES = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize("tokens", [1, 3])
def test_layers_of_ranks(tailing: EmulatedOps, folder: Path, tokens: int) -> None:
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
        for links.norms, links.tails in MODES:
            x = ops.array(parts_of(50, 1, tokens, n)[0])
            ops.launched.clear()
            for layer in range(layers):
                h = ops.rms_norm(x, gain, 1e-6)
                ops.all_reduce(ops.linear(ops.linear(h, inner[layer]), into[layer]), x.shape, x)
            out = ops.rms_norm(x, gain, 1e-6)
            ops._catch_up()
            found += [ops.to_host(x), ops.to_host(out)]
            names = [instance.name for instance, *_ in ops.launched]
            kinds = "TAIL=1", "group_sum_norm", "rms_norm_rows"
            counts = [sum(kind in name for name in names) for kind in kinds]
            if links.tails:
                assert counts == [layers, 0, 1], names
            else:
                assert counts[:2] == [0, layers * links.norms], names
        return found

    first, other = Stage(tailing, one_island(2)).run(work)
    check([other], first)
    for i in (2, 4, 6):
        check([first[i : i + 2]], first[:2])


@pytest.mark.parametrize("shape", [(9, 4096), (1, 8208), (1, 4104)])
def test_some_sums_are_launched(shape: tuple[int, int]) -> None:
    links = Links(1, 0, 8, Islands((tuple(range(8)),)), np.zeros(2, np.uint32))
    assert not group.can_tail(links, shape)
    assert group.can_tail(links, (8, 8192))
    links.ranks = 9
    assert not group.can_tail(links, (8, 8192))


def test_a_rank_that_does_not_come_is_named(tailing: EmulatedOps) -> None:
    def work(ops: EmulatedOps, links: Links, rank: int) -> None:
        inner, weight, x = operands(ops)
        for _ in range(3):
            product_of(ops, inner, weight, None).launch(x, True, group.line_of(links))

    stage = Stage(tailing, one_island(2), seconds=0.2)
    began = time.monotonic()
    (error,) = stage.run(work, [0])
    assert isinstance(error, GroupError)
    assert str(error) == "rank 0 has waited 0.2 s for rank 1, which has not come"
    assert stage.words[16] == 1
    assert time.monotonic() - began < 20


def test_an_abort_ends_a_wait(tailing: EmulatedOps) -> None:
    stage = Stage(tailing, one_island(2))

    def work(ops: EmulatedOps, links: Links, rank: int) -> None:
        if rank == 0:
            inner, weight, x = operands(ops)
            product_of(ops, inner, weight, None).launch(x, True, group.line_of(links))
        else:
            time.sleep(0.3)
            stage.words[0] = 1

    error, _ = stage.run(work)
    assert str(error) == "the group was ended while rank 0 waited for rank 1"


def operands(ops: EmulatedOps) -> tuple[DeviceArray, CudaWeight, DeviceArray]:
    n, k = 272, 512
    weight = ops.weight(random_raw("Q8_0", n, k, 3), "Q8_0", (n, k))
    return ops.array(parts_of(1, 1, 1, k)[0]), weight, ops.array(parts_of(2, 1, 1, n)[0])
