"""Which backend the options ask for on which computer."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import msgspec
import pytest
from voltapile.gateway.cli.options import (
    add_model_options,
    choose_backend,
    devices,
    options_of,
    size,
    sizes,
)
from voltapile.topology import machine
from voltapile.topology.gpu import Gpu
from voltapile.topology.plan import Options

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


def options(*words: str) -> Options:
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    return options_of(parser.parse_args(["-m", "x", *words]))


def test_sizes() -> None:
    assert size("64G") == size("64") == size("64GiB") == 64 << 30
    assert size("1.5g") == 3 << 29
    assert size("500M") == 500 << 20
    assert size("16k") == 16 << 10
    assert sizes("1M,2M") == [1 << 20, 2 << 20]
    for text in ("", "-1G", "x", "nan", "1Q"):
        with pytest.raises(ValueError):  # noqa: PT011
            size(text)


def test_memory_for_states() -> None:
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    for number in (-1, 0, 7):
        assert parser.parse_args(["-m", "x", "-cram", str(number)]).cache_ram == number
    with pytest.raises(SystemExit):
        parser.parse_args(["-m", "x", "-cram", "-5"])


def test_devices() -> None:
    assert devices("cuda") == devices("cpu") == []
    assert devices("cuda:1,CUDA0,2") == [1, 0, 2]
    with pytest.raises(ValueError):  # noqa: PT011
        devices("tpu:0")


def test_options_of_placement() -> None:
    found = options(
        "-ot", "a=CPU", "-ot", "b=pinned", "-ncmoe", "7", "-ngl", "20", "-fit", "off", "-ts", "3,1",
        "-sm", "layer", "--host-memory", "64G", "--vram", "11G", "--margin", "300M",
    )  # fmt: skip
    assert found.overrides == ["a=CPU", "b=pinned"]
    assert (found.cpu_moe, found.gpu_layers, found.fit) == (7, 20, False)
    assert (found.tensor_split, found.split_mode) == ([3.0, 1.0], "layer")
    assert (found.host_bytes, found.vram_bytes) == (64 << 30, [11 << 30])
    assert found.margin_bytes == 300 << 20
    assert options("-cmoe").cpu_moe > 1000
    plain = options()
    assert (plain.cpu_moe, plain.gpu_layers, plain.fit, plain.overrides) == (0, -1, True, [])
    assert plain == Options()


def test_a_machine_on_paper_needs_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = LAPTOP.parent / "x86-2xv100-16gb.json"
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    args = parser.parse_args(["-m", "x", "--machine", str(path)])
    assert choose_backend(args, machine.load(path)) == "cuda"
