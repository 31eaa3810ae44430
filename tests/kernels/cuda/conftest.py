"""Hands tests the module beside this file that stands for cupy, and a place for kernels."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

DAYS = 7


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled kernels are kept from run to run, and from test to test (emulation.py)."""
    cache = getattr(request.config, "cache", None)
    if cache is None:  # pytest -p no:cacheprovider
        return tmp_path_factory.mktemp("emulated_kernels")
    path: Path = cache.mkdir("emulated_kernels")
    for file in path.glob("*.so"):
        if time.time() - file.stat().st_mtime > DAYS * 86400:
            file.unlink()
    return path


@pytest.fixture(scope="session")
def fake_cupy() -> ModuleType:
    path = Path(__file__).with_name("fake_cupy.py")
    spec = importlib.util.spec_from_file_location("cuda_tests_fake_cupy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
