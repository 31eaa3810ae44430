"""Proofs that what one rank writes arrives at another, and how fast: patterns over whole rooms.

A pair is proven by the very addresses that its kernels will use later. Also how fast a GPU reads
host memory of each CPU node. Knows addresses and ranks, not how they were opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from voltapile.kernels.cuda.group import CHECK, FILL
from voltapile.kernels.cuda.launch import Launcher
from voltapile.kernels.cuda.links import ROOM
from voltapile.kernels.group import Group

REPEATS = 4  # of a pattern, for its speed
PACK = 16
BLOCK = 256


class Prover(Launcher, Protocol):
    """A CudaOps, as far as it is needed here."""

    device: Any  # a Device

    def to_host(self, x: Any) -> np.ndarray: ...


def patterns(
    ops: Prover, group: Group, to: Sequence[int | None], into: Sequence[int]
) -> np.ndarray:
    """GB/s [ranks, ranks] from each rank to each other; 0 where nothing was written, or it did not
    arrive. All ranks call this. to: this rank's room at each other one, None: not to be tried."""
    speeds = np.zeros((group.ranks, group.ranks), np.float32)
    for turn in range(1, group.ranks):  # all write at once, each to another
        target = (group.rank + turn) % group.ranks
        source = (group.rank - turn) % group.ranks
        room = to[target]
        speed = 0.0 if room is None else write(ops, room, _seed(group.rank, target))
        told = np.frombuffer(b"".join(group.exchange(np.float32(speed).tobytes())), np.float32)
        is_there = bool(told[source]) and holds(ops, into[source], _seed(source, group.rank))
        for rank, answer in enumerate(group.exchange(bytes([is_there]))):
            writer = (rank - turn) % group.ranks
            speeds[writer, rank] = told[writer] * answer[0]
    return speeds


def _seed(source: int, target: int) -> int:
    return 1 + 16 * source + target


def write(ops: Prover, address: int, seed: int, nbytes: int = ROOM) -> float:
    """Fill a room; returns GB/s."""
    grid, count = _shape(ops, nbytes)

    def fill(each: int) -> None:
        ops.kernel(FILL)(grid, BLOCK, (address, count, np.uint32(each)))

    fill(0)
    began = ops.device.event()
    for each in range(REPEATS):
        fill(seed + REPEATS - 1 - each)
    seconds = ops.device.seconds_between(began, ops.device.event())
    return float(REPEATS * nbytes / max(seconds, 1e-9) / 1e9)


def holds(ops: Prover, address: int, seed: int, nbytes: int = ROOM) -> bool:
    """Whether a room holds the pattern of a seed."""
    grid, count = _shape(ops, nbytes)
    with ops.scope():
        wrong = ops.scratch((1,), np.uint32)
        ops.device.clear(wrong.ptr, wrong.nbytes)
        ops.kernel(CHECK)(grid, BLOCK, (address, count, np.uint32(seed), wrong.ptr))
        return int(ops.to_host(wrong)[0]) == 0


def read(ops: Prover, address: int, nbytes: int) -> float:
    """GB/s at which this GPU reads memory."""
    grid, count = _shape(ops, nbytes)
    with ops.scope():
        wrong = ops.scratch((1,), np.uint32)
        call = address, count, np.uint32(0), wrong.ptr
        ops.kernel(CHECK)(grid, BLOCK, call)
        began = ops.device.event()
        for _ in range(REPEATS):
            ops.kernel(CHECK)(grid, BLOCK, call)
        seconds = ops.device.seconds_between(began, ops.device.event())
    return float(REPEATS * nbytes / max(seconds, 1e-9) / 1e9)


def _shape(ops: Launcher, nbytes: int) -> tuple[tuple[int], np.int64]:
    return (4 * ops.multiprocessors,), np.int64(nbytes // PACK)
