"""voltapile doctor: its lines and its exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from voltapile.gateway.cli import doctor
from voltapile.gateway.cli.main import main
from voltapile.topology import doctor as checks
from voltapile.topology.doctor import Finding


@pytest.mark.parametrize(("level", "code"), [("fault", 1), ("slow", 0), ("note", 0)])
def test_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: str, code: int
) -> None:
    def examine(sight: Any) -> Iterator[Finding]:
        yield Finding("ok", "fine")
        yield Finding(level, "ill", "a cure")

    monkeypatch.setattr(checks, "examine", examine)
    monkeypatch.setattr(doctor, "installation", lambda found: iter(()))
    assert main(["doctor", "-q"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"{level:5}  ill", "       -> a cure"]
    assert len(lines) == 3


def test_this_computer(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    out = capsys.readouterr().out
    assert "ok     the C++ module loads" in out
    assert "/dev/shm: " in out


def test_gpus_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    import msgspec
    from voltapile.topology.gpu import Gpu
    from voltapile.topology.machine import probe

    gpu = Gpu(index=0, name="V100", arch=70, memory_bytes=2, free_bytes=1)
    found = msgspec.structs.replace(probe(), gpus=[gpu])
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    told = [each for each in doctor.installation(found) if each.level == "fault"]
    assert [each.remedy for each in told] == [".venv/bin/pip install '.[cuda]'"]


@pytest.mark.parametrize(
    ("seen", "level", "part"),
    [
        (["0000:04:00.0", "0000:05:00.0"], "ok", "CUDA sees 2 GPU(s)"),
        (["0000:05:00.0", "0000:04:00.0"], "fault", "CUDA_DEVICE_ORDER"),
        (["0000:04:00.0"], "slow", "CUDA_VISIBLE_DEVICES"),
        ([], "fault", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_cuda_sees(
    monkeypatch: pytest.MonkeyPatch, seen: list[str], level: str, part: str
) -> None:
    module = ModuleType("voltapile.kernels.cuda.device")
    monkeypatch.setattr(module, "addresses", lambda: seen, raising=False)
    monkeypatch.setitem(sys.modules, "voltapile.kernels.cuda.device", module)
    (found,) = doctor._cuda(["0000:04:00.0", "0000:05:00.0"])
    assert found.level == level
    assert part in found.what + found.remedy
