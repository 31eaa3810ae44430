"""The collectives' kernels and launchers on the CPU: ranks are processes with shared memory."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.kernels.cuda import group
from voltapile.kernels.cuda.compile import CSRC
from voltapile.kernels.cuda.launch import CudaWeight
from voltapile.kernels.cuda.links import (
    FLAGS_AT,
    LONGEST_ROW,
    MESSAGE,
    MOST_RANKS,
    PACK_BLOCKS,
    PIECE,
    PIECE_BLOCKS,
    RECORD,
    ROOM,
    SLOTS,
    TAIL_COLUMNS,
    TAIL_RANKS,
    TAIL_ROWS,
    TWIN,
    Islands,
    Links,
    Way,
    Words,
    islands_of,
    record_of,
)
from voltapile.kernels.cuda.rows import NORM_ROWS, rms_norm
from voltapile.kernels.group import GroupError

from .emulation import EmulatedOps, has_compiler

FORK = multiprocessing.get_context("fork")
PATIENCE = 120.0
Work = Callable[[EmulatedOps, Links, int], Any]


@pytest.fixture(scope="module")
def ops(folder: Path) -> EmulatedOps:
    """With all kernels compiled, so that processes share them."""
    if not has_compiler():
        pytest.skip("there is no g++")
    ops = EmulatedOps(70, folder, 96 << 10)
    for instance in [*group.INSTANCES, NORM_ROWS]:
        ops.kernel(instance)
    return ops


@pytest.fixture(scope="module", params=[70, 90])
def norming(request: pytest.FixtureRequest, folder: Path) -> EmulatedOps:
    """As before and after rows can be copied past the registers."""
    if not has_compiler():
        pytest.skip("there is no g++")
    ops = EmulatedOps(request.param, folder, 96 << 10)
    for instance in (group.SUM, group.SUM_NORM, NORM_ROWS):
        ops.kernel(instance)
    return ops


class Stage:
    """Shared memory of some ranks, and a process for each."""

    def __init__(
        self,
        ops: EmulatedOps,
        islands: Sequence[Sequence[int]],
        narrow: frozenset[tuple[int, int]] = frozenset(),
        seconds: float = 60.0,
        start: int = 0,
    ) -> None:
        self.ops, self.islands, self.narrow = ops, Islands(tuple(map(tuple, islands))), narrow
        self.seconds, self.start = seconds, start
        self.ranks = sum(map(len, islands))
        self.map = mmap.mmap(-1, self.ranks * self.ranks * ROOM + 4096)
        self.memory = np.frombuffer(self.map, np.uint8)
        if start:  # as if so many exchanges had been: close to where counters wrap round
            rooms = self.memory[:-4096].reshape(-1, ROOM)
            rooms[:, : 2 * PACK_BLOCKS * SLOTS * 24] = 0x55
            rooms[:, FLAGS_AT:].view(np.uint32)[:] = start % (1 << 32)
        self.words = self.memory[-4096:].view(np.int32)  # abort, then a wait and a report each
        self.pipes: list[Connection] = []

    def links(self, rank: int) -> Links:
        at = self.memory.ctypes.data

        def room(source: int, target: int) -> int:
            return at + (target * self.ranks + source) * ROOM

        def way(other: int) -> Way:
            is_narrow = (rank, other) in self.narrow or (other, rank) in self.narrow
            return Way(room(rank, other), room(other, rank), is_narrow)

        mine = self.words[16 * (rank + 1) :]
        mine[0] = -1
        words = Words(self.words.ctypes.data, mine.ctypes.data, mine[4:].ctypes.data)
        ways = [way(other) for other in range(self.ranks)]
        record = record_of(rank, ways, self.islands, round(self.seconds * 1e9), words)
        counts = record.view(RECORD)[0]
        for name in ("packs", "pieces", "sent", "taken"):
            counts[name][:] = self.start % (1 << 32)
        counts["tails"] = (self.start << 16) % (1 << 32)
        self.kept = self.ops.array(record)
        report = mine[4:6].view(np.uint32)
        return Links(self.kept.ptr, rank, self.ranks, self.islands, report, self.seconds)

    def run(self, work: Work, ranks: Sequence[int] | None = None) -> list[Any]:
        """What `work` gives on each rank."""
        pipes, processes = [], []
        for rank in range(self.ranks) if ranks is None else ranks:
            mine, theirs = FORK.Pipe(duplex=False)
            process = FORK.Process(target=self._live, args=(work, rank, theirs))
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            return [self._hear(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()

    def _hear(self, pipe: Connection) -> Any:
        assert pipe in wait([pipe], PATIENCE), "a rank hangs"
        found = pipe.recv()
        if isinstance(found, AssertionError):
            raise found
        return found

    def _live(self, work: Work, rank: int, pipe: Connection) -> None:
        try:
            links = self.links(rank)
            found = work(self.ops, links, rank)
            links.check()
        except Exception as error:
            found = error
        pipe.send(found)
        os._exit(0)


def one_island(ranks: int) -> list[list[int]]:
    return [list(range(ranks))]


def parts_of(seed: int, ranks: int, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-3, 4, (ranks, *shape))
    return (rng.standard_normal((ranks, *shape)) * scale).astype(np.float32)


def total_of(parts: np.ndarray, islands: Sequence[Sequence[int]]) -> np.ndarray:
    """Of each island in its order, then of the islands."""

    def add(arrays: Sequence[np.ndarray]) -> np.ndarray:
        total = arrays[0].copy()
        for array in arrays[1:]:
            total += array
        return total

    return add([add([parts[rank] for rank in island]) for island in islands])


# --- layout ---------------------------------------------------------------------------------


def test_the_layout_is_that_of_the_kernels() -> None:
    text = (CSRC / "group.cuh").read_text()
    assert f"MOST_RANKS = {MOST_RANKS};" in text
    assert f"PACK_BLOCKS = {PACK_BLOCKS}, PIECE_BLOCKS = {PIECE_BLOCKS};" in text
    assert f"SLOTS = {SLOTS};" in text
    assert f"PIECE = {PIECE};" in text
    assert f"TWIN = {TWIN};" in text
    assert f"MESSAGE = {MESSAGE};" in text
    assert 2 * TWIN == PIECE
    assert ROOM >= FLAGS_AT + 4 * PIECE_BLOCKS * 4
    assert f"LONGEST_ROW = {LONGEST_ROW};" in text
    assert (
        f"TAIL_RANKS = {TAIL_RANKS}, TAIL_ROWS = {TAIL_ROWS}, TAIL_COLUMNS = {TAIL_COLUMNS};"
        in text
    )
    counts = 4 * (MOST_RANKS * (PACK_BLOCKS + 3 * PIECE_BLOCKS) + 2)
    assert RECORD.itemsize == 64 + 8 * MOST_RANKS + 32 * MOST_RANKS + counts


def test_islands_are_equal_groups_that_reach_each_other() -> None:
    def direct(*islands: Sequence[int]) -> np.ndarray:
        ranks = sum(map(len, islands))
        found = np.zeros((ranks, ranks), bool)
        for island in islands:
            found[np.ix_(island, island)] = True
        return found

    assert islands_of(direct([0, 1, 2], [3, 4, 5])).ranks == ((0, 1, 2), (3, 4, 5))
    assert islands_of(direct([0, 2], [1, 3])).ranks == ((0, 2), (1, 3))
    assert islands_of(direct([0, 1])).ranks == ((0, 1),)
    assert islands_of(direct([0], [1])).ranks == ((0,), (1,))
    assert islands_of(direct([0], [1], [2])).ranks == ((0, 1, 2),)
    assert islands_of(direct([0, 1, 2], [3, 4])).ranks == ((0, 1, 2, 3, 4),)
    one_way = direct([0, 1, 2, 3])
    one_way[0, 1] = False
    assert islands_of(one_way).ranks == ((0, 1, 2, 3),)
    assert Islands(((0, 2), (1, 3))).of(3) == (1, 1)


# --- sums -----------------------------------------------------------------------------------

SHAPES = [(1, 1), (1, 65), (2, 576), (3, 4099)]


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize(
    "islands",
    [one_island(2), one_island(3), [[0], [1]], [[0, 1], [2, 3]], [[0, 2, 4], [1, 3, 5]]],
    ids=str,
)
def test_sums_have_the_same_bits_on_all_ranks(
    ops: EmulatedOps, islands: list[list[int]], is_narrow: bool
) -> None:
    ranks = sum(map(len, islands))
    pairs = frozenset((a, b) for a in range(ranks) for b in range(ranks)) if is_narrow else ()

    def work(ops: EmulatedOps, links: Links, rank: int) -> list[np.ndarray]:
        found = []
        for seed, shape in enumerate(SHAPES):
            part = ops.array(parts_of(seed, ranks, *shape)[rank])
            out = ops.scratch(shape)
            group.all_reduce(ops, links, part, out, False)
            residual = ops.array(parts_of(seed + 50, 1, *shape)[0])
            group.all_reduce(ops, links, part if rank % 2 else None, residual, True)
            found += [ops.to_host(out), ops.to_host(residual)]
        return found

    expected = []
    for seed, shape in enumerate(SHAPES):
        parts = parts_of(seed, ranks, *shape)
        odd = parts.copy()
        odd[::2] = 0
        expected.append(total_of(parts, islands))
        expected.append(parts_of(seed + 50, 1, *shape)[0] + total_of(odd, islands))
    check(Stage(ops, islands, frozenset(pairs), start=-3).run(work), expected)


def check(results: list[Any], expected: Sequence[np.ndarray]) -> None:
    for rank, found in enumerate(results):
        assert not isinstance(found, Exception), found
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one.tobytes() == other.tobytes(), (rank, i)


def test_one_sum_after_another_in_blocks_of_all_sizes(ops: EmulatedOps) -> None:
    shapes = [(1, 100), (1, 40_000), (1, 3), (1, 9000), (1, 40_001), (1, 200)]

    def work(ops: EmulatedOps, links: Links, rank: int) -> list[np.ndarray]:
        rng, found = np.random.default_rng(rank), []
        for seed, shape in enumerate(shapes):
            time.sleep(rng.random() * 0.01)
            out = ops.scratch(shape)
            group.all_reduce(ops, links, ops.array(parts_of(seed, 2, *shape)[rank]), out, False)
            found.append(ops.to_host(out))
        return found

    expected = [total_of(parts_of(i, 2, *shape), one_island(2)) for i, shape in enumerate(shapes)]
    check(Stage(ops, one_island(2)).run(work), expected)


@pytest.mark.parametrize(
    "islands", [one_island(2), [[0], [1]], one_island(3), [[0, 1], [2, 3]]], ids=str
)
def test_sums_of_pieces(
    ops: EmulatedOps, monkeypatch: pytest.MonkeyPatch, islands: list[list[int]]
) -> None:
    monkeypatch.setattr(group, "PUSH_BYTES", 0)
    monkeypatch.setattr(group, "SLICE_BYTES", 0)
    monkeypatch.setattr(group, "PIECE_BLOCKS", 2)  # so that a block comes to several rounds
    ranks = sum(map(len, islands))
    shapes = [(1, 4), (1, 4096), (3, 12_340), (7, 8192)]

    def work(ops: EmulatedOps, links: Links, rank: int) -> list[np.ndarray]:
        found = []
        for seed, shape in enumerate(shapes):
            part = ops.array(parts_of(seed, ranks, *shape)[rank])
            out = ops.scratch(shape)
            group.all_reduce(ops, links, part, out, False)
            group.all_reduce(ops, links, None if rank else part, out, True)
            found.append(ops.to_host(out))
        kind = "group_sum_twins" if ranks == 2 else "group_sum_pieces"
        assert {each[0].function for each in ops.launched} == {kind}
        return found

    expected = []
    for seed, shape in enumerate(shapes):
        parts = parts_of(seed, ranks, *shape)
        expected.append(total_of(parts, islands) + parts[0])
    check(Stage(ops, islands, start=-2).run(work), expected)


@pytest.mark.parametrize(("rows", "n"), [(1, 576), (3, 4096), (2, 5120), (9, 516)])
def test_a_sum_with_its_norm_has_the_bits_of_both(norming: EmulatedOps, rows: int, n: int) -> None:
    ops = norming
    shape, weight = (rows, n), parts_of(7, 1, n)[0]

    def work(ops: EmulatedOps, links: Links, rank: int) -> list[np.ndarray]:
        found = []
        for round in range(5):
            time.sleep(((rank + round) % 3) * 0.01)
            part = ops.array(parts_of(round, 3, *shape)[rank])
            x, vector = ops.array(parts_of(50, 1, *shape)[0]), vector_of(ops, weight)
            if round == 1:
                group.all_reduce(ops, links, part, x, True)
                out = rms_norm(ops, x, vector, 1e-6)
            else:
                out = ops.scratch(shape)
                assert group.can_norm(links, shape)
                group.all_reduce_norm(ops, links, part, x, vector, 1e-6, out)
            found += [ops.to_host(x), ops.to_host(out)]
        return found

    expected = []
    for round in range(5):
        x = parts_of(50, 1, *shape)[0] + total_of(parts_of(round, 3, *shape), one_island(3))
        expected += [x, ops.to_host(rms_norm(ops, ops.array(x), vector_of(ops, weight), 1e-6))]
    check(Stage(ops, one_island(3), frozenset({(0, 2)}), start=-2).run(work), expected)


def test_every_float_can_be_summed_and_normed(norming: EmulatedOps) -> None:
    """The word whose complement would be an empty place is a NaN, and stays one."""
    words = np.array([0, 1 << 31, (1 << 32) - 1, 0x7FFFFFFF, 0x7F800000, 1, 0x3F800000], np.uint32)
    part = np.resize(words, (1, 516)).view(np.float32)

    def work(ops: EmulatedOps, links: Links, rank: int) -> list[np.ndarray]:
        x, out = ops.array(np.zeros_like(part)), ops.scratch(part.shape)
        vector = vector_of(ops, np.ones(516, np.float32))
        mine = None if rank == 1 else ops.array(part)
        group.all_reduce_norm(ops, links, mine, x, vector, 1e-6, out)
        return [ops.to_host(x)]

    for (found,) in Stage(norming, one_island(3)).run(work):
        np.testing.assert_array_equal(found, part + part)


def vector_of(ops: EmulatedOps, values: np.ndarray) -> CudaWeight:
    return ops.weight(values.view(np.uint8), "F32", values.shape)


@pytest.mark.parametrize("shape", [(2, 4098), (1, 16384), (2, 512), (33, 4096)])
def test_some_sums_are_normed_alone(shape: tuple[int, int]) -> None:
    links = Links(1, 0, 2, Islands(((0, 1),)), np.zeros(2, np.uint32))
    assert not group.can_norm(links, shape)
    assert group.can_norm(links, (8, 4096))


# --- prompts --------------------------------------------------------------------------------


def eights(values: np.ndarray) -> np.ndarray:
    """As a rank sees what another one has sent it as eights (csrc/group_eights.cuh)."""
    runs = values.reshape(-1, 8)
    largest = np.abs(runs).max(1, keepdims=True)
    unit = 2.0 ** (np.maximum(np.frexp(largest)[1] - 1, 13 - 127) - 12)
    whole = np.clip(np.rint(runs / unit), 1 - 2**13, 2**13 - 1)
    return (whole * unit + 0.0).astype(np.float32).reshape(values.shape)  # no -0


def test_eights_keep_twelve_bits_of_the_largest() -> None:
    values = parts_of(3, 1, 64, 64)[0]
    runs, errors = values.reshape(-1, 8), (eights(values) - values).reshape(-1, 8)
    assert (np.abs(errors).max(1) <= 2.0**-13 * np.abs(runs).max(1) * 1.001).all()


def scales_of(rank: int, rows: int) -> np.ndarray:
    return np.float32(0.25) * np.arange(rank + 1, rank + 1 + rows, dtype=np.float32)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("narrow", [frozenset(), frozenset({(0, 1)})], ids=["wide", "narrow"])
@pytest.mark.parametrize(("rows", "n"), [(5, 4096), (3, 5128), (9, 520), (4, 8)])
def test_a_prompts_sum_of_two_ranks(
    ops: EmulatedOps, rows: int, n: int, has_norm: bool, narrow: frozenset[tuple[int, int]]
) -> None:
    shape, weight = (rows, n), parts_of(7, 1, n)[0]

    def work(ops: EmulatedOps, links: Links, rank: int) -> list[np.ndarray]:
        links.blocks, found = 2, []
        for round in range(2):
            part = ops.array(parts_of(round, 2, *shape)[rank])
            x, out = ops.array(parts_of(50, 1, *shape)[0]), ops.array(np.zeros(shape, np.float32))
            norm = (vector_of(ops, weight), 1e-6, out) if has_norm else None
            only, bias, scales = part if rank or round == 0 else None, None, None
            if round == 0:
                scales = ops.array(scales_of(rank, rows))
                bias = None if rank else vector_of(ops, weight)
            group.all_reduce_rows(ops, links, only, x, round == 0, scales, bias, norm)
            found += [ops.to_host(x), ops.to_host(out)]
        return found

    results = Stage(ops, one_island(2), narrow, start=-2).run(work)
    check(results, results[0])
    for round in range(2):
        one, two = parts_of(round, 2, *shape)
        if round == 0:
            one, two = (part * scales_of(r, rows)[:, None] for r, part in enumerate((one, two)))
        one = one + weight if round == 0 else 0 * one
        old = parts_of(50, 1, *shape)[0] if round == 0 else np.float32(0)
        x = old + (eights(one) + eights(two))
        assert results[0][2 * round].tobytes() == x.tobytes()
        normed = ops.to_host(rms_norm(ops, ops.array(x), vector_of(ops, weight), 1e-6))
        close = np.allclose(results[0][2 * round + 1], normed if has_norm else 0, rtol=1e-5)
        assert close, round


@pytest.mark.parametrize("islands", [one_island(3), [[0, 1], [2, 3]]], ids=str)
def test_a_prompts_sum_of_any_ranks(
    ops: EmulatedOps, monkeypatch: pytest.MonkeyPatch, islands: list[list[int]]
) -> None:
    monkeypatch.setattr(group, "SLICE_BYTES", 0)
    monkeypatch.setattr(group, "PIECE_BLOCKS", 2)
    ranks = sum(map(len, islands))
    shapes = [(1, 8), (3, 12_344), (7, 8192)]

    def work(ops: EmulatedOps, links: Links, rank: int) -> list[np.ndarray]:
        ops.launched, found = [], []
        for seed, shape in enumerate(shapes):
            part, out = ops.array(parts_of(seed, ranks, *shape)[rank]), ops.scratch(shape)
            group.all_reduce_loosely(ops, links, part, out, False)
            found.append(ops.to_host(out))
        assert {each[0] for each in ops.launched} == {group.SUM_EIGHTS}
        return found

    results = Stage(ops, islands, start=-2).run(work)
    check(results, results[0])
    for seed, shape in enumerate(shapes):
        parts = parts_of(seed, ranks, *shape)
        largest = np.abs(parts).reshape(ranks, -1, 8).max(2).sum(0).repeat(8)
        error = np.abs(results[0][seed] - total_of(parts, islands)).reshape(-1)
        assert (error <= 3 * 2.0**-13 * largest).all()


def test_what_is_not_finite_arrives(ops: EmulatedOps) -> None:
    def work(ops: EmulatedOps, links: Links, rank: int) -> np.ndarray:
        values = np.ones((2, 64), np.float32)
        values[0, 9], values[1, 17] = (np.nan, -np.inf) if rank else (1, 1)
        x = ops.scratch((2, 64))
        group.all_reduce_rows(ops, links, ops.array(values), x, False)
        return ops.to_host(x)

    expected = np.full((2, 64), 2, np.float32)
    expected[0, 8:16] = expected[1, 16:24] = np.nan
    for found in Stage(ops, one_island(2)).run(work):
        np.testing.assert_array_equal(found, expected)


# --- the others -----------------------------------------------------------------------------


def test_parts_side_by_side(ops: EmulatedOps) -> None:
    shapes = [(1, (5, 0, 7)), (7, (64, 33, 1)), (2, (4096, 4096, 3000))]

    def work(ops: EmulatedOps, links: Links, rank: int) -> list[np.ndarray]:
        found = []
        for seed, (rows, widths) in enumerate(shapes):
            mine = np.ascontiguousarray(
                parts_of(seed, 3, rows, max(widths))[rank, :, : widths[rank]]
            )
            part = ops.array(mine) if widths[rank] else None
            out = ops.scratch((rows, sum(widths)))
            group.all_gather(ops, links, part, out, widths)
            found.append(ops.to_host(out))
        return found

    expected = []
    for seed, (rows, widths) in enumerate(shapes):
        parts = parts_of(seed, 3, rows, max(widths))
        expected.append(np.hstack([parts[r, :, :w] for r, w in enumerate(widths)]))
    check(Stage(ops, one_island(3), frozenset({(0, 2)})).run(work), expected)


def test_broadcast(ops: EmulatedOps) -> None:
    def work(ops: EmulatedOps, links: Links, rank: int) -> list[np.ndarray]:
        found = []
        for source in range(3):
            values = np.arange(5000, dtype=np.int32) * (source + 1)
            x = ops.array(values if rank == source else np.zeros_like(values))
            group.broadcast_(ops, links, x, source)
            found.append(ops.to_host(x))
        return found

    expected = [np.arange(5000, dtype=np.int32) * (source + 1) for source in range(3)]
    check(Stage(ops, one_island(3)).run(work), expected)


def test_messages_of_many_pieces(ops: EmulatedOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "PIECE_BLOCKS", 2)
    shapes = [(1, 4), (5, 4096), (3, 8192), (1, 576), (9, 4096)]

    def work(ops: EmulatedOps, links: Links, rank: int) -> list[np.ndarray]:
        found = []
        for seed, shape in enumerate(shapes):
            x = ops.array(parts_of(seed, 1, *shape)[0])
            if rank:
                x = ops.scratch(shape)
                group.receive(ops, links, x, rank - 1)
            found.append(ops.to_host(x))
            if rank < 2:
                group.send(ops, links, x, rank + 1)
        return found

    expected = [parts_of(seed, 1, *shape)[0] for seed, shape in enumerate(shapes)]
    check(Stage(ops, one_island(3), start=-2).run(work), expected)


def test_a_message_goes_while_two_are_not_received(ops: EmulatedOps) -> None:
    def work(ops: EmulatedOps, links: Links, rank: int) -> float:
        x = ops.array(np.ones((4, 1024), np.float32))
        began = time.monotonic()
        if rank:
            time.sleep(2.0)
        for _ in range(2):
            (group.receive if rank else group.send)(ops, links, x, 1 - rank)
        return time.monotonic() - began

    assert Stage(ops, one_island(2)).run(work)[0] < 1.8


def test_alone(ops: EmulatedOps) -> None:
    x = parts_of(0, 1, 5, 30)[0]
    found = ops.to_host(group.place(ops, ops.array(x), 100, 64))
    assert (found[:, 64:94] == x).all()
    assert not found[:, :64].any()
    assert not found[:, 94:].any()
    out = ops.array(x)
    group.add(ops, ops.array(x), out, True)
    assert (ops.to_host(out) == x + x).all()
    group.add(ops, None, out, False)
    assert not ops.to_host(out).any()


# --- waits that end -------------------------------------------------------------------------


def calls(kind: str, ops: EmulatedOps, links: Links, rank: int) -> None:
    x = ops.array(np.ones((40, 1024), np.float32))
    if kind == "receive":
        group.receive(ops, links, x, 1)
    elif kind == "send":
        for _ in range(3):
            group.send(ops, links, x, 1)
    elif kind == "gather":
        group.all_gather(ops, links, x, ops.scratch((40, 2048)), [1024, 1024])
    elif kind == "broadcast":
        group.broadcast_(ops, links, x, 1)
    elif kind == "norm":
        weight = vector_of(ops, np.ones(1024, np.float32))
        group.all_reduce_norm(ops, links, x[:4], x[4:8], weight, 1e-6, x[8:12])
    else:
        group.all_reduce(ops, links, x, x, True)


@pytest.mark.parametrize(
    "kind", ["sum", "norm", "pieces", "slices", "gather", "broadcast", "send", "receive"]
)
def test_a_rank_that_does_not_come_is_named(
    ops: EmulatedOps, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind in ("pieces", "slices"):
        monkeypatch.setattr(group, "PUSH_BYTES", 0)
        monkeypatch.setattr(group, "SLICE_BYTES", 0 if kind == "pieces" else 1 << 20)
    stage = Stage(ops, one_island(2), seconds=0.2)
    began = time.monotonic()
    (error,) = stage.run(lambda ops, links, rank: calls(kind, ops, links, rank), [0])
    assert isinstance(error, GroupError)
    assert str(error) == "rank 0 has waited 0.2 s for rank 1, which has not come"
    assert stage.words[16] == 1  # waits_for
    assert time.monotonic() - began < 20


def test_after_a_failure_nothing_waits_long(ops: EmulatedOps) -> None:
    def work(ops: EmulatedOps, links: Links, rank: int) -> float:
        calls("sum", ops, links, rank)
        began = time.monotonic()
        for _ in range(3):
            calls("sum", ops, links, rank)
        with pytest.raises(GroupError):
            links.check()
        return time.monotonic() - began

    began = time.monotonic()
    Stage(ops, one_island(2), seconds=3.0).run(work, [0])
    assert time.monotonic() - began < 3.0 + 3.0


def test_an_abort_ends_a_wait(ops: EmulatedOps) -> None:
    stage = Stage(ops, one_island(2))

    def work(ops: EmulatedOps, links: Links, rank: int) -> None:
        if rank == 0:
            calls("sum", ops, links, rank)
        else:
            time.sleep(0.3)
            stage.words[0] = 1

    error, _ = stage.run(work)
    assert isinstance(error, GroupError)
    assert str(error) == "the group was ended while rank 0 waited for rank 1"
