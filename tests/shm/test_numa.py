"""Placement is a wish: it works where libnuma is, and says once that it does not elsewhere."""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from voltapile.shm import numa


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    numa.libnuma.cache_clear()
    yield
    numa.libnuma.cache_clear()


def test_missing_library_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numa", None)
    with caplog.at_level(logging.INFO):
        assert not numa.keep_near(0)
        assert not numa.place(0, 4096, [0])
    assert len(caplog.records) == 1
    assert "libnuma is missing" in caplog.text


def test_place_on_the_node_that_every_machine_has() -> None:
    if numa.libnuma() is None:
        pytest.skip("no libnuma here")
    memory = mmap.mmap(-1, 1 << 16)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    assert numa.place(address, 1 << 16, [0])
    memory[0] = 1


def test_unknown_nodes_are_refused() -> None:
    assert not numa.keep_near(10_000)
    assert not numa.place(0, 4096, [10_000])
    assert not numa.place(0, 4096, [])


class FakeLibrary:
    """Remembers policies. status: what the kernel answers."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.policies = status, []

    def numa_max_node(self) -> int:
        return 255

    def set_mempolicy(self, mode: Any, mask: Any, bits: Any) -> int:
        nodes = [n for n in range(64 * len(mask)) if mask[n // 64] >> n % 64 & 1]
        self.policies.append((mode.value, nodes))
        return self.status

    def mbind(self, *args: Any) -> int:
        return self.status


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As an AC922: GPUs' memory at 255 and 254; here also a node with CPUs and no memory."""
    (tmp_path / "has_cpu").write_text("0,4,8\n")
    (tmp_path / "has_memory").write_text("0,8,254-255\n")
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0/cpulist").write_text(f"{min(os.sched_getaffinity(0))},100000\n")
    monkeypatch.setattr(numa, "FOLDER", tmp_path)
    return tmp_path


def test_nothing_spills_over_to_the_memory_of_gpus(
    nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = FakeLibrary()
    monkeypatch.setattr(numa, "libnuma", lambda: library)
    assert numa.keep_near(8)
    assert numa.keep_near(4)
    assert library.policies == [(numa.MPOL_BIND, [0, 8])] * 2


def test_a_node_is_preferred_if_it_has_memory(nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibrary()
    monkeypatch.setattr(numa, "libnuma", lambda: library)
    (nodes / "has_memory").write_text("0,8\n")
    assert numa.keep_near(8)
    assert not numa.keep_near(4)
    assert library.policies == [(numa.MPOL_PREFERRED, [8])]


def test_a_container_that_forbids_it(
    nodes: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numa, "libnuma", lambda: FakeLibrary(-1))
    with caplog.at_level(logging.INFO):
        assert not numa.keep_near(8)
        assert not numa.place(0, 4096, [0, 8])
    assert len(caplog.records) == 2
    assert caplog.text.count("--cap-add SYS_NICE") == 2


def test_calls_run_on_a_node(nodes: Path) -> None:
    seen = []
    before = os.sched_getaffinity(0)
    numa.on_node(0, lambda: seen.append((os.sched_getaffinity(0), threading.get_ident())))
    assert seen[0][0] == {min(before)}
    assert seen[0][1] != threading.get_ident()
    assert os.sched_getaffinity(0) == before
    numa.on_node(7, lambda: seen.append((os.sched_getaffinity(0), 0)))  # unknown: anywhere
    assert seen[1][0] == before
    with pytest.raises(OSError, match="full"):
        numa.on_node(0, lambda: (_ for _ in ()).throw(OSError("full")))


def test_calls_run_anywhere_where_cpus_may_not_be_chosen(
    nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    seen: list[int] = []
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    numa.on_node(0, lambda: seen.append(1))
    assert seen == [1]


def test_lists_of_the_kernel() -> None:
    assert numa.parse("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert numa.parse("\n") == []
