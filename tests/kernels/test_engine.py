"""The pool and its command lists: tiny lists, too many threads, abort, heartbeat, threads gone."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from voltapile.kernels.cpu.ops import CpuOps


def count_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def copies(ops: CpuOps, x: np.ndarray, count: int) -> np.ndarray:
    """x through a chain of `count` commands."""
    ops.reset_scratch()
    for _ in range(count):
        x = ops.copy(x)
    return x


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_thousands_of_tiny_lists(threads: int) -> None:
    ops = CpuOps(threads, 1 << 16)
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    for i in range(2000 // threads):
        x[0, 0] = i
        assert (copies(ops, x, 1) == x).all()


@pytest.mark.parametrize("threads", [2, 16])
def test_a_long_list_reads_what_the_command_before_wrote(threads: int) -> None:
    ops = CpuOps(threads, 1 << 20)
    x = np.zeros((16, 5), np.float32)
    with ops.capture() as graph:
        last = copies(ops, x, 100)
    assert len(graph) == 100
    for i in range(10):
        x[:] = i
        graph.replay()
        assert (last == i).all()


def test_workers_wake_after_a_sleep() -> None:
    ops = CpuOps(2, 1 << 16)
    x = np.ones((4, 4), np.float32)
    for _ in range(5):
        assert (copies(ops, x, 2) == 1).all()
        time.sleep(0.02)  # far past the spinning


def test_sleeping_workers_cost_nothing() -> None:
    ops = CpuOps(4, 1 << 16)
    copies(ops, np.ones((4, 4), np.float32), 1)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_threads_end_with_the_ops() -> None:
    before = count_threads()
    ops = CpuOps(4, 1 << 16)
    assert count_threads() == before + 3
    del ops
    assert count_threads() == before


def test_a_graph_keeps_its_engine_and_arrays() -> None:
    ops = CpuOps(2, 1 << 16)
    x = np.full((4, 4), 7, np.float32)
    with ops.capture() as graph:
        y = ops.copy(x)
    del x, ops
    junk = [np.zeros((4, 4), np.float32) for _ in range(100)]
    graph.replay()
    assert (y == 7).all()
    assert len(junk) == 100


def test_abort_stops_a_list() -> None:
    flag = np.zeros(1, np.uint32)
    ops = CpuOps(2, 1 << 16, abort=flag.ctypes.data)
    x = np.ones((4, 4), np.float32)
    assert (copies(ops, x, 1) == 1).all()
    flag[0] = 1
    with pytest.raises(RuntimeError, match="aborted"):
        ops.copy(x)
    flag[0] = 0
    assert (copies(ops, x, 1) == 1).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_abort_while_a_list_runs(threads: int) -> None:
    """The GIL is free during a replay: another thread raises the flag and sees the heartbeat."""
    flag, beat = np.zeros(1, np.uint32), np.zeros(1, np.int64)
    ops = CpuOps(threads, 1 << 26, heartbeat=beat.ctypes.data, abort=flag.ctypes.data)
    x = np.ones((1000, 1000), np.float32)
    with ops.capture() as graph:
        for _ in range(20000):  # seconds
            with ops.scope():
                ops.copy(x)
    beats = set()

    def interrupt() -> None:
        for _ in range(20):
            beats.add(int(beat[0]))
            time.sleep(0.005)
        flag[0] = 1

    other = threading.Thread(target=interrupt)
    begin = time.monotonic()
    other.start()
    with pytest.raises(RuntimeError, match="aborted"):
        graph.replay()
    other.join()
    assert time.monotonic() - begin < 3
    assert len(beats) > 3
    assert abs(time.monotonic_ns() - int(beat[0])) < 3e9
    flag[0] = 0
    assert (ops.copy(x) == 1).all()


def test_pinning_to_absent_cpus_is_harmless() -> None:
    affinity_of_caller: list[np.ndarray] = []

    def use() -> None:  # in a thread of its own: the caller is pinned, too
        ops = CpuOps(2, 1 << 16, cpus=[0, 900])
        affinity_of_caller.append(copies(ops, np.ones((4, 4), np.float32), 3).copy())

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert (affinity_of_caller[0] == 1).all()


def test_recording_twice_is_refused() -> None:
    ops = CpuOps(1, 1 << 16)
    with ops.capture(), pytest.raises(RuntimeError, match="already"), ops.capture():
        pass


def test_an_error_ends_the_recording() -> None:
    ops = CpuOps(1, 1 << 16)
    with pytest.raises(ZeroDivisionError), ops.capture():
        raise ZeroDivisionError
    x = np.ones((2, 2), np.float32)
    assert (ops.copy(x) == 1).all()
