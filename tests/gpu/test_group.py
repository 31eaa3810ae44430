"""Six ranks in one process on one GPU: a stream each, all ways of sums, many replays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from voltapile.kernels.cuda import group, stream
from voltapile.kernels.cuda.rows import rms_norm
from voltapile.kernels.cuda.tails import product_of
from voltapile.kernels.group import GroupError
from voltapile.shm.board import Board
from voltapile.workers.group import meet

RANKS = 6
PATIENCE = 30.0  # seconds; other tests may use the GPU at the same time
WAYS = {
    "one island": ([], []),
    "two islands": ([0, 0, 0, 1, 1, 1], []),
    "a pair by the host": ([], [(1, 4)]),
}


@pytest.fixture(scope="module", params=WAYS)
def ranks(request: pytest.FixtureRequest, ptx: Path | None) -> Iterator[list[Any]]:
    from voltapile.kernels.cuda.ops import CudaOps

    islands, faults = WAYS[request.param]
    all_ops = [CudaOps(0, 64 << 20, ptx) for _ in range(RANKS)]
    with joined(all_ops, PATIENCE, islands, faults):
        yield all_ops
    for ops in all_ops:
        ops.prepare(lambda: None)


@contextmanager
def joined(
    all_ops: Sequence[Any],
    seconds: float,
    islands: Sequence[int] = (),
    faults: Sequence[tuple[int, int]] = (),
) -> Iterator[Board]:
    """A group of them all whose waits last for so long."""
    name = f"test-{uuid4().hex[:12]}"
    board = Board.create(name, len(all_ops))

    def join(rank: int) -> None:
        board.join(rank)
        met = meet(name, board, rank, seconds, 60.0, islands)
        met.faults = faults
        all_ops[rank].join(met)

    try:
        in_threads(len(all_ops), join)
        yield board
    finally:
        board.close()


def in_threads(count: int, work: Callable[[int], None]) -> None:
    errors: list[Exception] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"


def put(ops: Any, values: np.ndarray) -> Any:
    array = ops.zeros(values.shape, values.dtype)
    ops.upload(array, values)
    return array


def parts_of(seed: int, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-3, 4, (RANKS, *shape))
    return (rng.standard_normal((RANKS, *shape)) * scale).astype(np.float32)


def total_of(parts: np.ndarray, has_islands: bool) -> np.ndarray:
    def add(arrays: Sequence[np.ndarray]) -> np.ndarray:
        total = arrays[0].copy()
        for array in arrays[1:]:
            total += array
        return total

    return add([add(parts[:3]), add(parts[3:])]) if has_islands else add(parts)


def record(all_ops: list[Any], step: Callable[[int, Any], None]) -> list[Any]:
    """A graph of each rank. Everything is loaded first, since kernels will wait for each other."""
    for rank, ops in enumerate(all_ops):
        ops.prepare(lambda rank=rank, ops=ops: step(rank, ops))
        ops.reset_scratch()
    graphs = []
    for rank, ops in enumerate(all_ops):
        with ops.capture() as graph:
            step(rank, ops)
        graphs.append(graph)
    return graphs


# small, so that all ranks' blocks are on the GPU at once
SHAPES = [(1, 576), (1, 4096), (3, 1000), (7, 1023)]
LARGE = (20, 16_384)


@pytest.mark.gpu
def test_sums(ranks: list[Any], request: pytest.FixtureRequest) -> None:
    has_islands = ranks[0]._links.islands > 1
    shapes = [*SHAPES, LARGE]
    parts = [parts_of(seed, *shape) for seed, shape in enumerate(shapes)]
    mine = [[put(ops, each[rank]) for each in parts] for rank, ops in enumerate(ranks)]
    sums = [[put(ops, np.zeros(shape, np.float32)) for shape in shapes] for ops in ranks]

    def step(rank: int, ops: Any) -> None:
        for i, shape in enumerate(shapes):
            ops.all_reduce(mine[rank][i], shape, sums[rank][i])

    graphs = record(ranks, step)
    for graph in graphs:
        graph.replay()
    for rank, ops in enumerate(ranks):
        ops.synchronize()
        for i in range(len(shapes)):
            expected = total_of(parts[i], has_islands) + np.float32(0)
            assert ops.to_host(sums[rank][i]).tobytes() == expected.tobytes(), (rank, shapes[i])


@pytest.mark.gpu
def test_sums_with_their_norms(ranks: list[Any]) -> None:
    """The bits of a sum and of a norm after it, replay after replay."""
    shapes = [(1, 2048), (3, 4096), (6, 5120)]
    links = ranks[0]._links
    if links.islands > 1:
        pytest.skip("islands sum in two steps")
    assert all(group.can_norm(links, shape) for shape in shapes)
    rng, count = np.random.default_rng(3), 200
    parts = [parts_of(seed, *shape) for seed, shape in enumerate(shapes)]
    mine = [[put(ops, each[rank]) for each in parts] for rank, ops in enumerate(ranks)]
    weights = [rng.standard_normal(n).astype(np.float32) for _, n in shapes]
    vectors = [[ops.weight(each.view(np.uint8), "F32", each.shape) for each in weights]
               for ops in ranks]  # fmt: skip
    found = [[[put(ops, np.zeros(shape, np.float32)) for shape in shapes] for _ in range(4)]
             for ops in ranks]  # fmt: skip

    def step(rank: int, ops: Any) -> None:
        sums, outs, apart, normed = found[rank]
        for i, (part, vector) in enumerate(zip(mine[rank], vectors[rank], strict=True)):
            group.all_reduce_norm(ops, ops._links, part, sums[i], vector, 1e-6, outs[i])
            group.all_reduce(ops, ops._links, part, apart[i], True)
            rms_norm(ops, apart[i], vector, 1e-6, out=normed[i])

    graphs = record(ranks, step)
    for i in range(count):
        for rank in rng.permutation(RANKS):
            graphs[rank].replay()
        if i % 16 == 15:
            for ops in ranks:
                ops.synchronize()
    told = []
    for rank, ops in enumerate(ranks):
        ops.synchronize()
        sums, outs, apart, normed = ([ops.to_host(x) for x in each] for each in found[rank])
        for one, other in zip([*sums, *outs], [*apart, *normed], strict=True):
            assert one.tobytes() == other.tobytes(), rank
        told.append(b"".join(each.tobytes() for each in [*sums, *outs]))
    assert set(told) == {told[0]}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 6])
def test_products_that_make_the_sum_of_their_parts(ranks: list[Any], tokens: int) -> None:
    """The bits of a product and a sum behind it, with a rank among them whose part lies in memory,
    whoever comes late."""
    n, k, count = 320, 1024, 60  # few blocks, since those of all ranks wait for each other
    shape = tokens, n
    if ranks[0]._links.islands > 1 or ranks[0].arch < stream.ARCH:
        pytest.skip("islands sum in two steps, and Volta's products make no sums")
    if ranks[0].multiprocessors < RANKS * n // 16:
        pytest.skip("blocks of all ranks need a multiprocessor each")
    rng = np.random.default_rng(5)
    operands = [operands_of(ops, rng, tokens, n, k) for ops in ranks]
    found = [[put(ops, np.zeros(shape, np.float32)) for _ in range(2)] for ops in ranks]

    def in_tail(rank: int, ops: Any) -> None:
        product = product_of(ops, *operands[rank], None)
        if rank == 4:
            product.launch(product.sums, False, ())
            group.all_reduce_tail(ops, ops._links, product.sums, found[rank][0], True)
        else:
            product.launch(found[rank][0], True, group.line_of(ops._links))

    def behind(rank: int, ops: Any) -> None:
        product = product_of(ops, *operands[rank], None)
        product.launch(product.sums, False, ())
        group.all_reduce(ops, ops._links, product.sums, found[rank][1], True)

    # Graphs of one product: those behind it would begin early, and fill the GPU that others need.
    ways = [record(ranks, step) for step in (in_tail, behind)]
    for _ in range(count):
        for graphs in ways:
            for rank in rng.permutation(RANKS):
                time.sleep(rng.random() * 1e-3)
                graphs[rank].replay()
            for ops in ranks:
                ops.synchronize()
    told = [[ops.to_host(x).tobytes() for x in each]
            for ops, each in zip(ranks, found, strict=True)]  # fmt: skip
    assert {text for each in told for text in each} == {told[0][0]}
    assert np.isfinite(np.frombuffer(told[0][0], np.float32)).all()
    assert np.frombuffer(told[0][0], np.float32).any()


def operands_of(ops: Any, rng: np.random.Generator, tokens: int, n: int, k: int) -> tuple[Any, Any]:
    scales = np.full((n * k // 32, 1), 1e-3, np.float16).view(np.uint8)
    codes = rng.integers(0, 256, (n * k // 32, 32)).astype(np.uint8)
    weight = ops.weight(np.hstack([scales, codes]).reshape(-1), "Q8_0", (n, k))
    return put(ops, rng.standard_normal((tokens, k)).astype(np.float32)), weight


@pytest.mark.gpu
def test_many_replays(ranks: list[Any]) -> None:
    shape, count = (2, 3000), 2000
    parts = [put(ops, np.full(shape, 1.0 + rank, np.float32)) for rank, ops in enumerate(ranks)]
    sums = [put(ops, np.zeros(shape, np.float32)) for ops in ranks]
    flags = [put(ops, np.full(9, rank, np.int32)) for rank, ops in enumerate(ranks)]
    wide: list[Any] = [None] * RANKS

    def step(rank: int, ops: Any) -> None:
        for _ in range(3):
            ops.all_reduce(parts[rank], shape, sums[rank])
        wide[rank] = ops.all_gather(parts[rank], 2, [3000] * RANKS)
        if rank:
            ops.receive(shape, rank - 1)
        if rank < RANKS - 1:
            ops.send(parts[rank], rank + 1)
        ops.broadcast_(flags[rank], 2)

    graphs = record(ranks, step)
    order = np.random.default_rng(0)
    for i in range(count):
        for rank in order.permutation(RANKS):
            graphs[rank].replay()
        if i % 16 == 15:
            for ops in ranks:
                ops.synchronize()
    for rank, ops in enumerate(ranks):
        ops.synchronize()
        assert (ops.to_host(sums[rank]) == 3 * count * sum(range(1, RANKS + 1))).all()
        assert (ops.to_host(flags[rank]) == 2).all()
        parts_seen = ops.to_host(wide[rank]).reshape(2, RANKS, 3000)
        assert (parts_seen == np.arange(1.0, RANKS + 1)[None, :, None]).all()


@pytest.mark.gpu
def test_a_rank_that_does_not_come(ptx: Path | None) -> None:
    from voltapile.kernels.cuda.ops import CudaOps

    both = [CudaOps(0, 16 << 20, ptx) for _ in range(2)]
    with joined(both, PATIENCE):  # loads, for which the driver may need longer than the others wait
        pass
    with joined(both, 1.0) as board:
        wait_for_the_other(both[0], board, lambda ops: ops.all_reduce(*ones_of(ops)))
    if both[0].arch >= stream.ARCH:
        x, weight = operands_of(both[0], np.random.default_rng(1), 1, 64, 256)
        out = put(both[0], np.zeros((1, 64), np.float32))
        with joined(both, 1.0) as board:
            wait_for_the_other(
                both[0],
                board,
                lambda ops: product_of(ops, x, weight, None).launch(
                    out, True, group.line_of(ops._links)
                ),
            )


def ones_of(ops: Any) -> tuple[Any, tuple[int, int]]:
    return ops.scratch((1, 100)), (1, 100)


def wait_for_the_other(ops: Any, board: Board, call: Callable[[Any], object]) -> None:
    ops.prepare(lambda: call(ops))
    call(ops)
    call(ops)
    with pytest.raises(GroupError, match=r"rank 0 has waited 1.0 s for rank 1, which has not come"):
        ops.synchronize()
    assert board.health(0).waits_for == 1
