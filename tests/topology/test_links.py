"""Seconds of meeting, by hand."""

from __future__ import annotations

import msgspec
import pytest
from reference import computer
from voltapile.topology.links import link_of, reduce_seconds, send_seconds

AC922, X86 = computer("ac922-6xv100-16gb"), computer("x86-4xv100-32gb")


def test_within_an_island() -> None:
    assert reduce_seconds(AC922, [0], 1e6) == 0
    assert reduce_seconds(AC922, [0, 1, 2], 50e3) == pytest.approx(3.2e-6 + 50e3 / 50e9)
    assert send_seconds(AC922, 0, 1, 50e3) == pytest.approx(4.2e-6)


def test_published_sums_of_four_v100s() -> None:
    for kib, seconds in ((80, 6.7e-6), (160, 11e-6), (320, 18.4e-6), (640, 34e-6)):
        assert reduce_seconds(X86, [0, 1, 2, 3], kib * 1024) == pytest.approx(seconds, rel=0.2)


def test_across_islands_is_another_way() -> None:
    inner = reduce_seconds(AC922, [0, 1, 2], 10e3)
    both = reduce_seconds(AC922, range(6), 10e3)
    assert both == pytest.approx(inner + 15e-6 + 10e3 / 10e9)


def test_unknown_links_are_slow() -> None:
    unknown = msgspec.structs.replace(X86, links=[])
    assert link_of(unknown, 0, 1).kind == "pcie"
    assert reduce_seconds(unknown, [0, 1], 1e4) > reduce_seconds(X86, [0, 1], 1e4)
