"""Pinning, in a process of its own so that this one keeps its CPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from voltapile.topology.affinity import pin


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


@pytest.mark.parametrize("node", [-1, 0])
def test_pins_this_process(node: int) -> None:
    cpu = max(os.sched_getaffinity(0))
    code = (
        "import os; from voltapile.topology.affinity import pin; "
        f"print(pin([{cpu}], {node}), os.sched_getaffinity(0))"
    )
    assert run(code) == f"True {{{cpu}}}"


def test_without_libnuma_cpus_are_still_pinned() -> None:
    cpu = max(os.sched_getaffinity(0))
    code = (
        "import os, sys; sys.modules['numa'] = None; "
        "from voltapile.topology.affinity import pin; "
        f"print(pin([{cpu}], 0), os.sched_getaffinity(0))"
    )
    assert run(code) == f"True {{{cpu}}}"


def test_cpus_that_do_not_exist(caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    assert not pin([100_000])
    assert "cannot pin to CPUs [100000]" in caplog.text
    assert os.sched_getaffinity(0) == before
    assert pin([])
