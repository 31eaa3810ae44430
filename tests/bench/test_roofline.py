"""bench/roofline.py prints every step for a measured card and for one that is only computed."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

PROGRAM = Path(__file__).parents[2] / "bench/roofline.py"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_roofline", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_it_prints_every_step(mini: Path) -> None:
    model = mini / "qwen3/model-f16.gguf"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(model)], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured, computed = done.stdout.split("\n## ")[1:]
    assert measured.startswith("NVIDIA H200")
    assert "calibrated against measurements of 2026" in measured
    assert "ARITHMETIC, NOT MEASURED" not in measured
    assert computed.startswith("Tesla V100")
    assert "ARITHMETIC, NOT MEASURED" in computed
    for part in (measured, computed):
        assert part.count("| decode at ") == 4
        assert part.count(" streams at ") == 2
        assert part.count("| prefill ") == 4


def test_a_fit_finds_what_it_was_made_of(program: ModuleType) -> None:
    rng = np.random.default_rng(0)
    costs, inverse = rng.uniform(0, 1, (12, 4)), np.array([1.5, 0.0, 2.0, 7.0])
    seconds = costs @ inverse
    found = program.non_negative(costs / seconds[:, None], np.ones(12))
    np.testing.assert_allclose(found, inverse, atol=1e-9)
    costs[:, 2] = 0  # nothing says how much this one counts
    found = program.non_negative(costs / (costs @ inverse)[:, None], np.ones(12))
    assert found[2] == 0
    assert (found >= 0).all()
