"""Ways between GPUs are opened, proven and replaced: with processes for ranks and no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import mmap
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from voltapile.kernels.cuda import group as launchers
from voltapile.kernels.cuda import proof
from voltapile.kernels.cuda.launch import DeviceArray
from voltapile.kernels.cuda.links import ROOM, Islands, Links
from voltapile.kernels.cuda.rows import NORM_ROWS
from voltapile.kernels.group import GroupError
from voltapile.shm.board import Board
from voltapile.workers.group import meet

from .emulation import EmulatedOps, has_compiler

FORK = multiprocessing.get_context("fork")
PATIENCE = 120.0
RANKS = 4
UNREACHABLE = 217  # cudaErrorPeerAccessUnsupported

Pair = tuple[int, int]


class HostDevice:
    """A Device whose memory is shared with the other ranks' processes. broken: pairs of this rank
    and another whose memory cannot be opened; deaf: those where what is written gets lost."""

    def __init__(self, memory: np.ndarray, rank: int, broken: set[Pair], deaf: set[Pair]) -> None:
        self.number, self.memory = rank, memory
        self.ticks_per_second = 1e9
        self.locked: list[tuple[int, int]] = []  # host memory
        self._broken = {pair[1] for pair in broken if pair[0] == rank}
        self._deaf = {pair[1] for pair in deaf if pair[0] == rank}
        self.failure: type[Exception] = Exception

    def allocate(self, nbytes: int, purpose: str) -> Any:
        assert (nbytes, purpose) == (RANKS * ROOM, "communication")
        return SimpleNamespace(ptr=self._place(self.number), nbytes=nbytes)

    def _place(self, rank: int) -> int:
        return int(self.memory.ctypes.data) + rank * RANKS * ROOM

    def clear(self, ptr: int, nbytes: int) -> None:
        ctypes.memset(ptr, 0, nbytes)

    def send(self, target: int, pinned: int, nbytes: int) -> None:
        ctypes.memmove(target, pinned, nbytes)

    def synchronize(self) -> None:
        pass

    def handle_of(self, memory: Any) -> bytes:
        return self.number.to_bytes(64, "little")

    def open_handle(self, handle: bytes) -> int:
        other = int.from_bytes(handle, "little")
        if other in self._broken:
            raise self.failure(UNREACHABLE)
        if other in self._deaf:
            self._elsewhere = np.zeros(RANKS * ROOM, np.uint8)
            return int(self._elsewhere.ctypes.data)
        return self._place(other)

    def is_linked(self, other: int) -> bool:
        return {self.number, other} != {0, 1}

    def register(self, address: int, nbytes: int) -> int:
        self.locked.append((address, nbytes))
        return address

    def unregister(self, address: int) -> None:
        """What is page-locked must still be mapped."""
        [place] = (each for each in self.locked if each[0] == address)
        self.locked.remove(place)
        assert is_mapped(address)

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[Any]]:
        yield [None]  # what is called inside runs at once

    def replay(self, graph: Any) -> None:
        pass

    def event(self) -> float:
        return time.perf_counter()

    def seconds_between(self, first: float, last: float) -> float:
        return last - first


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False


@pytest.fixture
def wires(fake_cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    fake_cupy.install(monkeypatch, fake_cupy.Gpu(copies=True))
    return importlib.import_module("voltapile.kernels.cuda.wires")


@pytest.fixture(scope="module")
def emulated(folder: Path) -> EmulatedOps:
    if not has_compiler():
        pytest.skip("there is no g++")
    ops = EmulatedOps(70, folder, 96 << 10)
    for instance in [*launchers.INSTANCES, NORM_ROWS]:
        ops.kernel(instance)
    return ops


Opened = Callable[..., list[Any]]


@pytest.fixture
def opened(
    wires: Any, emulated: EmulatedOps, fake_cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Opened]:
    """opened(...) -> of each rank (islands, narrow peers, warnings, whether sums are right), or
    what it raised."""
    monkeypatch.setattr(wires.proof, "REPEATS", 1)
    monkeypatch.setattr(wires.proof, "NORM_CALLS", 2)
    name = f"test-{uuid4().hex[:12]}"
    board = Board.create(name, RANKS)
    shared = mmap.mmap(-1, RANKS * RANKS * ROOM)
    memory = np.frombuffer(shared, np.uint8)

    def live(rank: int, pipe: Connection, options: dict[str, Any]) -> None:
        try:
            found: Any = one(rank, **options)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        pipe.send(found)
        os._exit(0)

    def one(
        rank: int,
        broken: set[Pair] = frozenset(),  # type: ignore[assignment]
        deaf: set[Pair] = frozenset(),  # type: ignore[assignment]
        islands: Sequence[int] = (),
        faults: Sequence[Pair] = (),
    ) -> Any:
        told: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
        wires.log.addHandler(handler)
        mine = Board.open(name, RANKS)
        mine.join(rank)
        group = meet(name, mine, rank, 30.0, PATIENCE, islands)
        group.faults = faults
        ops: Any = emulated
        ops.device = HostDevice(memory, rank, set(broken), set(deaf))
        ops.device.failure = fake_cupy.CUDARuntimeError
        ops.prepare = lambda run: None  # all is compiled
        links = wires.open_links(ops, group)
        record = record_at(links)
        narrow = [other for other in range(RANKS) if record["peers"][other]["is_narrow"]]
        assert links.blocks == 2 * emulated.multiprocessors
        found = links.islands, links.mates, narrow, told, sums_are_right(ops, links)
        mine.close()
        del record, group, mine
        assert lets_go(ops.device, links)
        return found

    def open_all(**options: Any) -> list[Any]:
        pipes, processes = [], []
        for rank in range(RANKS):
            ours, theirs = FORK.Pipe(duplex=False)
            process = FORK.Process(target=live, args=(rank, theirs, options))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            for pipe in pipes:
                assert pipe in wait([pipe], PATIENCE), "a rank hangs"
            return [pipe.recv() for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()

    yield open_all
    board.close()


def record_at(links: Links) -> Any:
    from voltapile.kernels.cuda.links import RECORD

    raw = (ctypes.c_uint8 * RECORD.itemsize).from_address(links.record)
    return np.frombuffer(raw, RECORD)[0]


def lets_go(device: HostDevice, links: Links) -> bool:
    """Host memory stays mapped as long as it is page-locked, which is as long as the links live."""
    locked = [address for address, _ in device.locked]
    assert len(locked) >= 2
    assert all(map(is_mapped, locked))
    links._owners = ()
    gc.collect()
    return not device.locked and not any(map(is_mapped, locked))


def sums_are_right(ops: EmulatedOps, links: Links) -> bool:
    """A small sum and parts side by side, which take every way."""
    x = np.arange(600, dtype=np.float32) + links.rank
    out = ops.scratch((1, 600))
    launchers.all_reduce(ops, links, ops.array(x), out, False)
    total = RANKS * np.arange(600) + sum(range(RANKS))
    wide = ops.scratch((1, 600 * RANKS))
    launchers.all_gather(ops, links, ops.array(x), wide, [600] * RANKS)
    links.check()
    parts = np.hstack([np.arange(600) + rank for rank in range(RANKS)])
    return bool((ops.to_host(out)[0] == total).all() and (ops.to_host(wide)[0] == parts).all())


def test_all_reach_each_other(opened: Opened) -> None:
    narrow = {0: [1], 1: [0]}  # by PCIe
    for rank, found in enumerate(opened()):
        assert found == (1, RANKS, narrow.get(rank, []), [], True)


@pytest.mark.parametrize("is_shared", [False, True])
def test_ranks_of_one_process_measure_no_sums(
    opened: Opened, wires: Any, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    """They may share a GPU, which has no places for all that would start early."""

    def norm_pays(*_: Any) -> bool:
        wires.log.warning("measured")
        return False

    monkeypatch.setattr(wires.proof, "norm_pays", norm_pays)
    if is_shared:
        monkeypatch.setattr(wires, "os", SimpleNamespace(getpid=lambda: 1))
    for found in opened():
        assert found[3:] == ([] if is_shared else ["measured"], True)


def test_islands_that_are_declared_go_by_the_host(opened: Opened) -> None:
    for rank, found in enumerate(opened(islands=[0, 1, 0, 1])):
        others = [other for other in range(RANKS) if (other - rank) % 2]
        assert found == (2, 2, others, [], True)


def test_a_pair_that_cannot_be_opened_goes_by_the_host(opened: Opened) -> None:
    for rank, found in enumerate(opened(broken={(2, 3)})):
        narrow = {0: [1], 1: [0], 2: [3], 3: [2]}[rank]
        assert found[:3] == (1, RANKS, narrow)
        assert found[4]


@pytest.mark.parametrize("options", [{"deaf": {(2, 3)}}, {"faults": [(2, 3)]}], ids=str)
def test_a_pair_whose_pattern_is_lost_goes_by_the_host(
    opened: Opened, options: dict[str, Any]
) -> None:
    for rank, found in enumerate(opened(**options)):
        narrow = {0: [1], 1: [0], 2: [3], 3: [2]}[rank]
        assert found[:3] == (1, RANKS, narrow)
        lost = ["what rank 2 writes to rank 3's GPU does not arrive: the two go by host memory"]
        assert found[3] == (lost if rank == 2 else [])
        assert found[4]


def test_host_memory_that_does_not_carry_is_an_error(
    opened: Opened, wires: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = opened_with_lost_mail(opened, wires, monkeypatch)
    text = "what rank 0 writes to rank 1 does not arrive, by host memory neither"
    assert found == [f"{GroupError.__name__}: {text}"] * RANKS


def opened_with_lost_mail(opened: Opened, wires: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    real = wires._mailboxes
    lost: list[np.ndarray] = []

    def elsewhere(each: Any) -> dict[int, int]:
        boxes: dict[int, int] = real(each)
        if each.group.rank == 0:
            lost.append(np.zeros(RANKS * ROOM, np.uint8))
            boxes[1] = int(lost[0].ctypes.data)
        return boxes

    monkeypatch.setattr(wires, "_mailboxes", elsewhere)
    return opened(islands=[0, 1, 0, 1])


class Recorder(EmulatedOps):
    """Writes down what is done where kernels of other ranks may wait for it; `device` too."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.device: Any = self
        self.is_rehearsing = False
        self.arch, self.max_shared = 90, 227 << 10

    def scratch(self, shape: Sequence[int], dtype: Any = np.float32) -> DeviceArray:
        return DeviceArray(256, tuple(shape), dtype)

    def clear(self, ptr: int, nbytes: int) -> None:
        pass

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def prepare(self, run: Callable[[], None]) -> None:
        self.is_rehearsing = True
        run()
        self.is_rehearsing = False

    def kernel(self, instance: Any) -> Callable[..., None]:
        self.log.append(f"{'load' if self.is_rehearsing else 'record'} {instance.function}")
        return lambda *_, **__: None

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[Any]]:
        yield ["graph"]

    def replay(self, graph: Any) -> None:
        self.log.append("replay")

    def event(self) -> float:
        return 0.0

    def seconds_between(self, first: float, last: float) -> float:
        return 1.0


def test_ranks_meet_between_what_loads_and_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All may be in one process on one GPU, where to load is to wait for what runs."""
    monkeypatch.setattr(proof, "NORM_CALLS", 1)
    ops: Any = Recorder()

    def exchange(data: bytes) -> list[bytes]:
        ops.log.append("meet")
        return [data, data]

    group: Any = SimpleNamespace(exchange=exchange)
    links = Links(1, 0, 2, Islands(((0, 1),)), np.zeros(2, np.uint32))
    assert not proof.norm_pays(ops, links, group)
    kernels = ["group_sum_norm", "group_sum", "rms_norm_rows"]
    before = [f"{what} {kernel}" for what in ("load", "record") for kernel in kernels]
    replays = ["replay"] * 2 * (1 + proof.REPEATS)
    assert ops.log == [*before, "synchronize", "meet", *replays, "meet"]


@pytest.mark.parametrize("missing", ["", "process", "link", "memory", "arch", "other"])
def test_products_make_sums_where_all_ranks_are_near(
    wires: Any, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(wires.proof, "norm_pays", lambda *_: False)
    told: list[bytes] = []

    def exchange(data: bytes) -> list[bytes]:
        told.append(data)
        return [data, data, bytes([missing != "other"])]

    group: Any = SimpleNamespace(exchange=exchange, rank=0, ranks=3)
    ops: Any = SimpleNamespace(arch=75 if missing == "arch" else 80)
    own = wires.Wires(ops, group, SimpleNamespace(), are_apart=missing != "process")
    own.is_linked = [True, True, missing != "link"]
    own.by_host = np.zeros((3, 3), bool)
    own.by_host[0, 1] = missing == "memory"
    links = Links(1, 0, 3, Islands(((0, 1, 2),)), np.zeros(2, np.uint32))
    wires._choose(own, links)
    assert links.tails == (not missing)
    assert told == [bytes([missing in ("", "other")])]


def test_nodes_with_cpus_and_memory(tmp_path: Path) -> None:
    assert proof.cpu_nodes(tmp_path) == [0]
    (tmp_path / "has_cpu").write_text("0,8\n")
    (tmp_path / "has_memory").write_text("0,8,252-255\n")
    assert proof.cpu_nodes(tmp_path) == [0, 8]


def test_every_node_is_read(emulated: EmulatedOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "cpu_nodes", lambda: [0])
    ops: Any = emulated
    ops.device = HostDevice(np.zeros(0, np.uint8), 0, set(), set())
    group: Any = SimpleNamespace(
        name=f"test-{uuid4().hex[:12]}", rank=0, ranks=1, exchange=lambda data: [data]
    )
    assert proof.nodes(ops, group)[0] > 0
    assert not list(Path("/dev/shm").glob(f"*{group.name}*"))
    monkeypatch.setattr(proof, "NODE_BYTES", 1 << 60)
    assert proof.nodes(ops, group) == {}  # no room is no reason to end
