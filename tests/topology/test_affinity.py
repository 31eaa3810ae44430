"""Pinning, in a process of its own so that this one keeps its CPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from voltapile.shm import numa
from voltapile.topology.affinity import pin


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


CODE = (
    "import os; from voltapile.topology.affinity import pin; "
    "print(pin([{cpu}], {node}), sorted(os.sched_getaffinity(0)))"
)


def test_pins_this_process() -> None:
    cpu = max(os.sched_getaffinity(0))
    assert run(CODE.format(cpu=cpu, node=-1)) == f"True [{cpu}]"


def test_helpers_do_not_inherit_a_single_core() -> None:
    """All CPUs of the node stay open to threads that do not compute."""
    cpu, here = max(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    own = sorted((numa.cpus_of(0) & here) | {cpu})
    assert run(CODE.format(cpu=cpu, node=0)) == f"True {own}"


def test_without_libnuma_cpus_are_still_pinned() -> None:
    cpu = max(os.sched_getaffinity(0))
    code = "import sys; sys.modules['numa'] = None; " + CODE.format(cpu=cpu, node=100)
    assert run(code) == f"True [{cpu}]"


def test_cpus_that_do_not_exist(caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    assert not pin([100_000])
    assert "cannot pin to CPUs [100000]" in caplog.text
    assert os.sched_getaffinity(0) == before
    assert pin([])


def test_a_cpu_that_is_not_there_beside_one_that_is(caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    try:
        assert pin([min(before), 1023])
    finally:
        os.sched_setaffinity(0, before)
    assert "CPUs [1023] of the plan are not there" in caplog.text
