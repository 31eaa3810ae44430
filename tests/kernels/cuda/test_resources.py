"""Every kernel compiles for sm_70, sm_75 and sm_90 and takes no more than the table says; on the
first two none spills.

`python -m voltapile.kernels.cuda --table tests/kernels/cuda/resources.json` writes the table.
`pytest -k sm70` selects one architecture. A few run with every test, all of them in CI.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from voltapile.kernels.cuda import nvrtc
from voltapile.kernels.cuda.compile import compile_all
from voltapile.kernels.cuda.launch import Instance
from voltapile.kernels.cuda.resources import NEVER_SPILL, Resources, parse, resources_of, table
from voltapile.kernels.cuda.rows import SOFTCAP
from voltapile.kernels.cuda.table import INSTANCES

TABLE = json.loads((Path(__file__).parent / "resources.json").read_text())
MOST_SHARED = {"sm_70": 96 << 10, "sm_75": 64 << 10, "sm_90": 227 << 10}
ARCHS = [pytest.param(arch, id=arch.replace("_", "")) for arch in TABLE]
FEW = [each for each in INSTANCES if not each.defines or dict(each.defines).get("FORMAT") == "Q4_K"]


@pytest.fixture(autouse=True)
def _needs_nvrtc_12() -> None:
    try:
        found = nvrtc.version()
    except nvrtc.NvrtcMissingError as missing:
        pytest.skip(str(missing))
    if found != (12, 9):
        pytest.skip(f"the table is of NVRTC 12.9, not {found}")


def check(instance: Instance, arch: str) -> None:
    used = resources_of(instance, arch)
    assert not used.spilled or arch not in NEVER_SPILL, f"{instance.name} spills {used.spilled}"
    assert used.shared <= MOST_SHARED[arch], used
    assert instance.name in TABLE[arch], f"{instance.name} is not in the table of {arch}"
    allowed = Resources(*TABLE[arch][instance.name])
    assert used.registers <= allowed.registers, (used, allowed)
    assert used.spilled <= allowed.spilled, (used, allowed)
    assert used.stack <= allowed.stack, (used, allowed)
    assert used.shared <= allowed.shared, (used, allowed)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("instance", FEW[:4], ids=lambda each: each.name)
def test_some_fit(instance: Instance, arch: str) -> None:
    check(instance, arch)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", ARCHS)
def test_all_fit(arch: str) -> None:
    compile_all(INSTANCES, arch, len(os.sched_getaffinity(0)))
    for instance in INSTANCES:
        check(instance, arch)


@pytest.mark.parametrize("arch", list(TABLE))
def test_the_table_lists_nothing_else(arch: str) -> None:
    assert set(TABLE[arch]) == {each.name for each in INSTANCES}


def test_a_log_is_read() -> None:
    log = (
        "ptxas info    : Compiling entry function 'f' for 'sm_70'\n"
        "ptxas info    : Function properties for f\n"
        "ptxas         .     40 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 28 registers, used 1 barriers, 128 bytes smem, 384 bytes cmem[0]\n"
        "ptxas info    : Compiling entry function 'g' for 'sm_70'\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 9 registers, used 0 barriers, 384 bytes cmem[0]\n"
    )
    assert parse(log, "f") == Resources(registers=28, spilled=12, stack=40, shared=128)
    assert parse(log, "g") == Resources(registers=9, spilled=0, stack=0, shared=0)
    with pytest.raises(ValueError, match="'h'"):
        parse(log, "h")


def test_a_table_of_another_architecture() -> None:
    """What spills there is for people to see; the table that tests compare with stays."""
    found = table([SOFTCAP], ["sm_90"])
    assert list(found) == ["sm_90"]
    registers, spilled, _, _ = found["sm_90"]["softcap"]
    assert registers > 0
    assert spilled == 0
