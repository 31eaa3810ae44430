"""CUDA_VISIBLE_DEVICES, from the environment to what is planned and told."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from voltapile.gateway.cli.doctor import choice
from voltapile.gateway.cli.main import main
from voltapile.topology.gpu import Gpu
from voltapile.topology.machine import Machine, probe


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What a probe of GPUs is told to see; it finds as many as there are words."""
    told: list[str | None] = []

    def probe_gpus(root: Path, seen: str | None = None) -> tuple[list[Gpu], list[Any]]:
        told.append(seen)
        size = {"memory_bytes": 64 << 30, "free_bytes": 60 << 30}
        count = 4 if seen is None else len(list(filter(None, seen.split(","))))
        gpus = [Gpu(index=i, name="A", arch=70, bus=f"0000:0{i}:00.0", **size)
                for i in range(count)]  # fmt: skip
        return gpus, []

    monkeypatch.setattr("voltapile.topology.machine.probe_gpus", probe_gpus)
    return told


@pytest.mark.parametrize(("text", "count"), [(None, 4), ("2,3", 2), ("GPU-1f", 1), ("", 0)])
def test_plan_and_probe_hand_it_on(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mini: Path,
    asked: list[str | None],
    text: str | None,
    count: int,
) -> None:
    if text is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert main(["probe"]) == 0
    assert len(json.loads(capsys.readouterr().out)["gpus"]) == count
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)  # cupy
    model = next((mini / "llama").glob("*.gguf"))
    assert main(["plan", "-m", str(model)]) == 0
    assert ("cuda:0" in capsys.readouterr().out) == bool(count)
    assert asked == [text, text]


def test_a_written_machine_has_its_own_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mini: Path, asked: list[str | None]
) -> None:
    from voltapile.topology.machine import save

    path = tmp_path / "machine.json"
    save(probe(), path)
    asked.clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model = next((mini / "llama").glob("*.gguf"))
    assert main(["plan", "-m", str(model), "--machine", str(path)]) == 0
    assert asked == []


def test_the_doctor_says_what_is_left(asked: list[str | None]) -> None:
    def told(found: Machine, seen: str | None) -> list[str]:
        return [each.what for each in choice(found, seen)]

    assert told(probe(), None) == []
    (line,) = told(probe(seen="3,1"), "3,1")
    assert line == "CUDA_VISIBLE_DEVICES='3,1' leaves these GPUs: " + (
        "cuda:0 at 0000:00:00.0, cuda:1 at 0000:01:00.0"
    )
    assert told(probe(seen=""), "")[0].endswith("leaves these GPUs: none")
    (line,) = told(probe(seen=""), "a\n\udcff")
    assert line.encode().count(b"\n") == 0, "whatever bytes it has, it can be printed"
