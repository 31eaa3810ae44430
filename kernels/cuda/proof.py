"""Proofs that what one rank writes arrives at another, and how fast: patterns over whole rooms.

A pair is proven by the very addresses that its kernels will use later. Also how fast a GPU reads
host memory of each CPU node, and what else is measured rather than assumed when a group begins.
Knows addresses and ranks, not how they were opened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from voltapile.kernels.cuda.group import (
    CHECK,
    FILL,
    all_reduce,
    all_reduce_norm,
    can_norm,
)
from voltapile.kernels.cuda.launch import CudaWeight, DeviceArray, Launcher
from voltapile.kernels.cuda.links import ROOM, Links
from voltapile.kernels.cuda.rows import rms_norm
from voltapile.kernels.group import Group
from voltapile.shm import numa
from voltapile.shm.segment import Segment, SegmentError

REPEATS = 4  # of a pattern, for its speed
PACK = 16
BLOCK = 256
NORM_WIDTH, NORM_CALLS, EPS = 4096, 50, 1e-6
NODE_BYTES = 32 << 20
NODE_FOLDER = Path("/sys/devices/system/node")


class Prover(Launcher, Protocol):
    """A CudaOps, as far as it is needed here."""

    device: Any  # a Device

    def prepare(self, run: Callable[[], None]) -> None: ...
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


def norm_pays(ops: Prover, links: Links, group: Group) -> bool:
    """Whether a sum together with the norm behind it is faster than one after the other, here and
    on all ranks. Both give the same bits."""
    shape = 1, NORM_WIDTH
    if not can_norm(links, shape):
        return False
    with ops.scope():
        part, x, out, ones = (_zeros(ops, shape) for _ in range(4))
        weight = CudaWeight((NORM_WIDTH,), ones.nbytes, "F32", ones.ptr, ones.nbytes)

        def together() -> None:
            all_reduce_norm(ops, links, part, x, weight, EPS, out)

        def apart() -> None:
            all_reduce(ops, links, part, x, True)
            with ops.scope():
                rms_norm(ops, x, weight, EPS)

        return _is_faster(ops, links, group, together, apart)


def _zeros(ops: Prover, shape: tuple[int, ...]) -> DeviceArray:
    array = ops.scratch(shape)
    ops.device.clear(array.ptr, array.nbytes)
    return array


def _is_faster(
    ops: Prover, links: Links, group: Group, one: Callable[[], None], two: Callable[[], None]
) -> bool:
    """Whether `one` is, on all ranks. Measured inside a recorded step, where it will be.

    Loading and recording wait for what runs on the GPU, and other ranks' kernels there may wait for
    this one: so all of it is done before anybody launches, and nothing is freed before all end."""

    def both() -> None:
        one()
        two()

    ops.prepare(both)
    recorded = [_recorded(ops, call) for call in (one, two)]
    ops.device.synchronize()
    group.exchange(b"")
    first, second = (_seconds(ops, each) for each in recorded)
    links.check()
    return all(answer[0] for answer in group.exchange(bytes([first < second])))


def _recorded(ops: Prover, call: Callable[[], None]) -> Any:
    with ops.device.capture() as recorded:
        for _ in range(NORM_CALLS):
            call()
    return recorded[0]


def _seconds(ops: Prover, recorded: Any) -> float:
    device = ops.device
    device.replay(recorded)
    began = device.event()
    for _ in range(REPEATS):
        device.replay(recorded)
    return float(device.seconds_between(began, device.event()))


def nodes(ops: Prover, group: Group) -> dict[int, float]:
    """GB/s at which this GPU reads host memory of each CPU node, one GPU at a time."""
    speeds: dict[int, float] = {}
    for node in cpu_nodes():
        for turn in range(group.ranks):
            if turn == group.rank:
                with contextlib.suppress(SegmentError, ops.device.failure):
                    speeds[node] = _node(ops, group, node)
            group.exchange(b"")
    return speeds


def _node(ops: Prover, group: Group, node: int) -> float:
    with Segment.create(group.name, f"node-{node}", NODE_BYTES, nodes=[node]) as segment:
        address = ops.device.register(segment.address, segment.nbytes)
        try:
            return read(ops, address, segment.nbytes)
        finally:
            ops.device.unregister(segment.address)


def cpu_nodes(folder: Path = NODE_FOLDER) -> list[int]:
    """Nodes with CPUs and memory: a GPU's memory may be a node too, and is none of them."""
    own = numa.nodes_with("cpu", folder) & numa.nodes_with("memory", folder)
    return sorted(own) or [0]


def _shape(ops: Launcher, nbytes: int) -> tuple[tuple[int], np.int64]:
    return (4 * ops.multiprocessors,), np.int64(nbytes // PACK)
