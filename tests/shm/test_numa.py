"""Placement is a wish: it works where libnuma is, and says once that it does not elsewhere."""

from __future__ import annotations

import logging
import mmap
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from voltapile.shm import numa


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    numa.library.cache_clear()
    yield
    numa.library.cache_clear()


def test_missing_library_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numa", None)
    with caplog.at_level(logging.INFO):
        assert not numa.prefer(0)
        assert not numa.place(0, 4096, [0])
    assert len(caplog.records) == 1
    assert "libnuma is missing" in caplog.text


def test_place_on_the_node_that_every_machine_has() -> None:
    if numa.library() is None:
        pytest.skip("no libnuma here")
    memory = mmap.mmap(-1, 1 << 16)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    assert numa.place(address, 1 << 16, [0])
    memory[0] = 1


def test_unknown_nodes_are_refused() -> None:
    assert not numa.prefer(10_000)
    assert not numa.place(0, 4096, [10_000])
    assert not numa.place(0, 4096, [])
