"""Time and try the collectives of several GPUs of this machine, one process for each.

    python bench/group.py [--ranks 2] [--islands] [--replays 10000] [--only times,replays,...]

times: a call of all_reduce inside a recorded step, and of others. sweep: each way of a sum. norms:
a sum and the norm after it, of few rows and of prompts. tails: a product before both, in whose tail
the sum may be. bits: every collective against numpy. replays: recorded steps with random pauses on
each rank. loss: a rank that is killed, stopped, or a group that is ended.
--islands makes each GPU an island of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any
from uuid import uuid4

import numpy as np
from voltapile.kernels.cuda import group as collectives
from voltapile.kernels.cuda.ops import CudaOps
from voltapile.kernels.cuda.rows import rms_norm
from voltapile.kernels.cuda.tails import product_of
from voltapile.kernels.group import GroupError
from voltapile.shm.board import Board
from voltapile.workers.group import BoardGroup, meet

SPAWN = multiprocessing.get_context("spawn")
SCRATCH = 1 << 30
CALLS, REPEATS = 100, 20  # in a recorded step; of it
SECONDS = 10.0  # that a wait may last
PATIENCE = 120.0

Work = Callable[[CudaOps, BoardGroup, argparse.Namespace], Any]


def parts_of(seed: int, ranks: int, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-3, 4, (ranks, *shape))
    return (rng.standard_normal((ranks, *shape)) * scale).astype(np.float32)


def put(ops: CudaOps, values: np.ndarray) -> Any:
    array = ops.zeros(values.shape, values.dtype)
    ops.upload(array, values)
    return array


def microseconds(ops: CudaOps, call: Callable[[], Any], calls: int = CALLS) -> float:
    """Of one call inside a recorded step of many."""
    ops.prepare(call)
    ops.reset_scratch()
    with ops.capture() as graph:
        for _ in range(calls):
            with ops.scope():
                call()
    graph.replay()
    ops.synchronize()
    began = ops.device.event()
    for _ in range(REPEATS):
        graph.replay()
    seconds = ops.device.seconds_between(began, ops.device.event())
    ops.synchronize()
    return seconds / REPEATS / calls * 1e6


def times(ops: CudaOps, group: BoardGroup, args: argparse.Namespace) -> list[str]:
    lines = []
    for kib in (4, 16, 20, 80, 160, 320, 640, 1024, 4096, 16384, 32768):
        shape = (1, kib * 256)
        part, x = put(ops, parts_of(0, 1, *shape)[0] * 0), put(ops, parts_of(1, 1, *shape)[0])
        calls = CALLS if kib <= 1024 else 20
        us = microseconds(ops, lambda p=part, s=shape, x=x: ops.all_reduce(p, s, x), calls)
        lines.append(f"all_reduce {kib:6} KiB {us:8.2f} us {kib * 1.024 / us:7.1f} GB/s")
    for rows, width in ((1, 75968), (8, 75968), (64, 75968)):
        mine = put(ops, parts_of(0, 1, rows, width)[0])
        widths = [width] * group.ranks
        us = microseconds(ops, lambda m=mine, r=rows, w=widths: ops.all_gather(m, r, w), 10)
        lines.append(f"all_gather {rows} x {width} each {us:8.2f} us")
    ids = put(ops, np.zeros(64, np.int32))
    lines.append(f"broadcast 64 ids {microseconds(ops, lambda: ops.broadcast_(ids, 0)):8.2f} us")
    for shape in ((1, 4096), (8, 4096), (512, 4096)):
        x = put(ops, parts_of(0, 1, *shape)[0])
        call = (lambda x=x: ops.send(x, 1)) if group.rank == 0 else None
        call = call or (lambda s=shape: ops.receive(s, 0))
        us = microseconds(ops, call, 20) if group.rank < 2 else 0.0
        lines.append(f"send and receive {shape} {us:8.2f} us")
    return lines


def sweep(ops: CudaOps, group: BoardGroup, args: argparse.Namespace) -> list[str]:
    """Each way of a sum at each size: where one should take over from another."""
    usual = collectives.PUSH_BYTES, collectives.SLICE_BYTES, collectives.FAVOURED_BLOCKS
    most = 1 << 30
    ways = {f"push {blocks}": (most, 0, blocks) for blocks in (16, 32, 64, 128)}
    ways |= {"slices 64": (0, most, 64), "slices 128": (0, most, 128), "pieces": (0, 0, 64)}
    lines = []
    for kib in (16, 20, 80, 160, 320, 640, 1024, 2048, 8192, 32768):
        shape = (1, kib * 256)
        part, x = put(ops, parts_of(0, 1, *shape)[0] * 0), put(ops, parts_of(1, 1, *shape)[0])
        found = []
        for way, numbers in ways.items():
            if (way.startswith("push") and kib > 768) or (way.startswith("sl") and kib > 2048):
                continue
            collectives.PUSH_BYTES, collectives.SLICE_BYTES, collectives.FAVOURED_BLOCKS = numbers
            call = lambda p=part, s=shape, x=x: ops.all_reduce(p, s, x)  # noqa: E731
            us = microseconds(ops, call, CALLS if kib <= 1024 else 20)
            found.append(f"{way}: {us:.2f}")
        lines.append(f"all_reduce {kib:6} KiB, us: {', '.join(found)}")
    collectives.PUSH_BYTES, collectives.SLICE_BYTES, collectives.FAVOURED_BLOCKS = usual
    return lines


def norms(ops: CudaOps, group: BoardGroup, args: argparse.Namespace) -> list[str]:
    """A sum added to the residual and the norm after it, as a model has them: one kernel or two."""
    links, lines = ops._links, []
    assert links is not None
    usual = links.norms, links.tails
    for rows, width in ((1, 2048), (1, 4096), (1, 5120), (8, 4096), (512, 4096), (2048, 4096)):
        shape, calls = (rows, width), CALLS if rows < 64 else 20
        part, x = put(ops, parts_of(0, 1, *shape)[0] * 0), put(ops, parts_of(1, 1, *shape)[0])
        weight = ops.weight(np.ones(width, np.float32).view(np.uint8), "F32", (width,))

        def both(p: Any = part, s: Any = shape, x: Any = x, w: Any = weight) -> None:
            ops.rms_norm(ops.all_reduce(p, s, x), w, 1e-6)

        def apart(p: Any = part, s: Any = shape, x: Any = x, w: Any = weight) -> None:
            ops.all_reduce(p, s, x)
            ops._catch_up()
            rms_norm(ops, x, w, 1e-6)  # not late: a launch of its own

        links.norms, links.tails = True, False
        one, two = microseconds(ops, both, calls), microseconds(ops, apart, calls)
        lines.append(f"all_reduce and norm {shape} {one:8.2f} us, as two kernels {two:.2f} us")
    links.norms, links.tails = usual
    return lines


def tails(ops: CudaOps, group: BoardGroup, args: argparse.Namespace) -> list[str]:
    """A product, the sum that it is a part of, and a norm; as many products alone, too."""
    links, lines = ops._links, []
    assert links is not None
    for rows, n, k in ((1, 4096, 2048), (1, 4096, 6144), (8, 4096, 2048), (1, 2048, 2048)):
        weight, inner = ops.dummy_weight("Q8_0", (n, k)), put(ops, np.zeros((rows, k), np.float32))
        x, out = (put(ops, np.zeros((rows, n), np.float32)) for _ in range(2))
        norm = ops.dummy_weight("F32", (n,))

        def call(way: str, p: Any = (inner, weight, None), a: Any = (x, norm, out)) -> None:
            made, (x, norm, out) = product_of(ops, *p), a
            if way == "tail":
                made.launch(x, True, collectives.line_of(links))
            else:
                made.launch(made.sums, False, ())
            if way == "one":
                collectives.all_reduce_norm(ops, links, made.sums, x, norm, 1e-6, out)
                return
            if way == "two":
                collectives.all_reduce(ops, links, made.sums, x, True)
            if way != "alone":
                rms_norm(ops, x, norm, 1e-6)

        ways = "alone", "tail", "two", "one"
        us = [microseconds(ops, lambda way=way: call(way)) for way in ways]
        each = ", ".join(f"{way} {found:.2f}" for way, found in zip(ways, us, strict=True))
        lines.append(f"product {rows} x {k} x {n}, us: {each}")
    return lines


def total_of(parts: np.ndarray, islands: Sequence[Sequence[int]]) -> np.ndarray:
    def add(arrays: Sequence[np.ndarray]) -> np.ndarray:
        total = arrays[0].copy()
        for array in arrays[1:]:
            total += array
        return total

    return add([add([parts[rank] for rank in island]) for island in islands])


def bits(ops: CudaOps, group: BoardGroup, args: argparse.Namespace) -> list[str]:
    rng, wrong, tried = np.random.default_rng(5), 0, 0
    islands = [[r] for r in range(group.ranks)] if args.islands else [list(range(group.ranks))]
    for seed in range(60):
        ops.reset_scratch()
        rows, width = int(rng.integers(1, 65)), int(4 * rng.integers(1, 2048))
        if seed % 20 == 0:
            rows = 2048
        parts = parts_of(seed, group.ranks, rows, width)
        residual = parts_of(seed + 1000, 1, rows, width)[0]
        part, x = put(ops, parts[group.rank]), put(ops, residual)
        time.sleep(float(np.random.default_rng().random()) * 1e-3)
        found = ops.to_host(ops.all_reduce(part, (rows, width), x))
        total = residual + total_of(parts, islands)
        if ops._exact_rows(rows) == rows:
            wrong += found.tobytes() != total.tobytes()
        else:  # as eights
            digests = group.exchange(hashlib.sha256(found.tobytes()).digest())
            wrong += (
                len(set(digests)) > 1 or np.abs(found - total).max() > 1e-3 * np.abs(parts).max()
            )
        widths = [width if r % 2 == 0 else width // 2 for r in range(group.ranks)]
        mine = put(ops, np.ascontiguousarray(parts[group.rank, :8, : widths[group.rank]]))
        found = ops.to_host(ops.all_gather(mine, len(mine), widths))
        expected = np.hstack([parts[r, :8, :w] for r, w in enumerate(widths)])
        wrong += found.tobytes() != expected.tobytes()
        source = seed % group.ranks
        ops.broadcast_(part, source)
        wrong += ops.to_host(part).tobytes() != parts[source].tobytes()
        after, before = (group.rank + 1) % group.ranks, (group.rank - 1) % group.ranks
        if rows <= 64:  # larger ones wait for the receiver, who waits for us
            ops.send(part, after)
            found = ops.to_host(ops.receive((rows, width), before))
            wrong += found.tobytes() != parts[source].tobytes()
        tried += 4
    return [f"bits: {wrong} of {tried} collectives differ from numpy"]


# --- replays with pauses --------------------------------------------------------------------


def replays(ops: CudaOps, group: BoardGroup, args: argparse.Namespace) -> list[str]:
    """Whole numbers, so that any number of sums is exact."""
    shapes = [(1, 5120), (1, 20480), (8, 4096), (1, 163840), (1, 576), (3, 1000), (96, 4096)]
    rng = np.random.default_rng(group.rank)
    arrays = []
    for i, shape in enumerate(shapes):
        values = (np.arange(np.prod(shape)).reshape(shape) % 5 + group.rank + i).astype(np.float32)
        arrays.append((put(ops, values), shape, put(ops, np.zeros(shape, np.float32))))
    flag = put(ops, np.full(64, group.rank, np.int32))

    def step() -> None:
        for part, shape, x in arrays:
            ops.all_reduce(part, shape, x)
        ops.broadcast_(flag, 0)
        ops.all_gather(arrays[2][0], 8, [4096] * group.ranks)

    ops.prepare(step)
    ops.reset_scratch()
    with ops.capture() as graph:
        step()
    began = time.perf_counter()
    for i in range(args.replays):
        if rng.random() < 0.2:
            time.sleep(rng.random() * 5e-4)
        graph.replay()
        if i % 8 == 7:
            ops.synchronize()
    ops.synchronize()
    seconds = time.perf_counter() - began
    wrong = 0
    for i, (_, shape, x) in enumerate(arrays):
        base = np.arange(np.prod(shape)).reshape(shape) % 5 + i
        total = args.replays * (base * group.ranks + sum(range(group.ranks)))
        wrong += ops.to_host(x).tobytes() != total.astype(np.float32).tobytes()
    return [f"replays: {args.replays} in {seconds:.1f} s, {wrong} of {len(shapes)} sums wrong"]


# --- a rank that is gone --------------------------------------------------------------------


def endless(ops: CudaOps, group: BoardGroup, args: argparse.Namespace) -> list[str]:
    """Steps until the group fails; tells how."""
    part, x = (put(ops, np.ones((4, 4096), np.float32)) for _ in range(2))

    def step() -> None:
        for _ in range(50):
            ops.all_reduce(part, (4, 4096), x)

    ops.prepare(step)
    ops.reset_scratch()
    with ops.capture() as graph:
        step()
    group.exchange(b"")
    Board.open(args.name, args.ranks).publish(group.rank, "ready")
    last = time.monotonic()
    while True:
        try:
            graph.replay()
            ops.synchronize()
            last = time.monotonic()
        except GroupError as error:
            return [f"after {time.monotonic() - last:.2f} s: {error}"]


WORKS: dict[str, Work] = {
    "bits": bits,
    "times": times,
    "sweep": sweep,
    "norms": norms,
    "tails": tails,
    "replays": replays,
    "loss": endless,
}


def live(
    name: str, rank: int, args: argparse.Namespace, works: list[str], pipe: Connection
) -> None:
    level = logging.INFO if works[0] != "loss" else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stdout)
    board = Board.open(name, args.ranks)
    board.join(rank)
    seconds = SECONDS if works[0] != "loss" else 1.0
    islands = list(range(args.ranks)) if args.islands else []
    try:
        ops = CudaOps(rank, SCRATCH)
        group = meet(name, board, rank, seconds, PATIENCE, islands)
        ops.join(group)
        for work in works:
            ops.reset_scratch()
            began = time.monotonic()
            found = WORKS[work](ops, group, args)
            pipe.send((work, time.monotonic() - began, found))
            if work != "loss":
                group.exchange(b"")
    except Exception:
        pipe.send(("error", 0.0, traceback.format_exc().splitlines()))
    pipe.send(None)
    sys.stdout.flush()
    os._exit(0)  # a kernel may hang


def run(
    args: argparse.Namespace, works: list[str], harm: Callable[..., None] | None = None
) -> bool:
    """One life of a group; prints what each rank tells."""
    name = args.name = f"bench-{uuid4().hex[:12]}"
    board = Board.create(name, args.ranks)
    pipes, processes = [], []
    for rank in range(args.ranks):
        ours, theirs = SPAWN.Pipe(duplex=False)
        process = SPAWN.Process(target=live, args=(name, rank, args, works, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    is_good = True
    if harm:
        deadline = time.monotonic() + args.patience
        while time.monotonic() < deadline and not all_ready(board):
            time.sleep(0.05)
        time.sleep(0.5)
        harm(board, processes)
    for rank, pipe in enumerate(pipes):
        while wait([pipe], args.patience if rank == 0 or not harm else 1.0):
            try:
                told = pipe.recv()
            except EOFError:
                break
            if told is None:
                break
            work, seconds, lines = told
            is_good &= work != "error"
            if rank == 0 or work in ("error", "bits", "replays", "loss"):
                for line in lines:
                    print(f"rank {rank} [{seconds:5.1f} s] {line}", flush=True)
        else:
            print(f"rank {rank} says nothing")
            is_good &= bool(harm)
    for process in processes:
        process.kill()
        process.join()
    board.close()
    return is_good


def all_ready(board: Board) -> bool:
    return all(board.health(rank).state == "ready" for rank in range(board.num_ranks))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--islands", action="store_true")
    parser.add_argument("--replays", type=int, default=10_000)
    parser.add_argument("--only", default="bits,times,norms,tails,replays,loss")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds for one measurement")
    args = parser.parse_args()
    works = args.only.split(",")
    usual = [work for work in works if work != "loss"]
    is_good = run(args, usual) if usual else True
    if "loss" in works:
        last = args.ranks - 1
        harms: dict[str, Callable[..., None]] = {
            "killed": lambda board, ranks: os.kill(ranks[last].pid, signal.SIGKILL),
            "stopped": lambda board, ranks: os.kill(ranks[last].pid, signal.SIGSTOP),
            "ended": lambda board, ranks: (
                os.kill(ranks[last].pid, signal.SIGSTOP),
                time.sleep(0.2),
                board.abort("a test"),
            ),
        }
        for harm, do in harms.items():
            print(f"the last rank is {harm}:", flush=True)
            is_good &= run(args, ["loss"], do)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
