"""What launches add is from end to end, so that those which overlap add up to the whole."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "bench/gpu_trace.py"


@pytest.fixture(scope="module")
def trace() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_trace", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_launches_add_from_end_to_end(trace: ModuleType) -> None:
    launches = [
        trace.Launch("product", 10.0, 14.0),
        trace.Launch("sum", 13.0, 15.0),  # begins before the product ends
        trace.Launch("product", 16.0, 19.0),  # a pause of 1 before it counts as its own
        trace.Launch("copy", 16.0, 17.0),  # seen later, ended earlier
    ]
    found = trace.added(launches)
    assert found == {"product": [4.0, 2.0], "sum": [1.0], "copy": [2.0]}
    assert sum(map(sum, found.values())) == 19.0 - 10.0


def test_a_table_is_of_one_step(trace: ModuleType) -> None:
    launches = [trace.Launch("product", 10.0 * i, 10.0 * i + 4.0) for i in range(4)]
    whole, _, row = trace.table(launches, steps=2)
    assert whole == "2 launches, 17.0 us"
    assert row.split() == ["2.0", "17.0", "8.50", "4.00", "100.0%", "product"]
