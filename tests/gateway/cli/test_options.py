"""Which backend the options ask for on which computer."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import msgspec
import pytest
from voltapile.gateway.cli.options import add_model_options, choose_backend
from voltapile.topology import machine
from voltapile.topology.gpu import Gpu

LAPTOP = Path(__file__).parents[2] / "data/machines/laptop.json"


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("has_cupy", [False, True])
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], "auto"),
        (["-ngl", "0"], "cpu"),
        (["-ngl", "99"], "auto"),
        (["--backend", "cpu"], "cpu"),
        (["--backend", "cuda"], "cuda"),
        (["--backend", "reference"], "reference"),
    ],
)
def test_backend(
    monkeypatch: pytest.MonkeyPatch, options: list[str], wanted: str, has_cupy: bool, has_gpu: bool
) -> None:
    computer = machine.load(LAPTOP)
    if has_gpu:
        gpu = Gpu(index=0, name="V100", arch=70, memory_bytes=16 << 30, free_bytes=15 << 30)
        computer = msgspec.structs.replace(computer, gpus=[gpu])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_cupy else None)
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    args = parser.parse_args(["-m", "x", *options])
    auto = "cuda" if has_gpu and has_cupy else "cpu"
    assert choose_backend(args, computer) == (auto if wanted == "auto" else wanted)
