"""Sources are gathered, compiled and kept so that nothing stale is ever run; no GPU is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from voltapile.kernels.cuda import compile as compiler
from voltapile.kernels.cuda import nvrtc
from voltapile.kernels.cuda.launch import Instance
from voltapile.kernels.cuda.table import INSTANCES

GATHER = Instance("elementwise.cu", "gather")


@pytest.fixture(autouse=True)
def _needs_nvrtc() -> None:
    try:
        nvrtc.libnvrtc()
    except nvrtc.NvrtcMissingError as missing:
        pytest.skip(str(missing))


def test_includes_are_put_in_once() -> None:
    text = compiler.source_of("embed.cu")
    assert text.count("struct Q4_K {") == 1
    assert '#include "' not in text
    assert '#line 1 "q4_k.h"' in text


def test_a_header_that_is_not_ours_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.cu").write_text('#include "nowhere.cuh"\n')
    monkeypatch.setattr(compiler, "CSRC", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"x\.cu: #include \"nowhere\.cuh\""):
        compiler.source_of("x.cu")


def test_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler.compile_instance(GATHER, "sm_70", tmp_path)
    assert first[:4] == b"\x7fELF"
    monkeypatch.setattr(nvrtc, "compile_source", None)  # a second compilation would fail
    assert compiler.compile_instance(GATHER, "sm_70", tmp_path) == first
    assert "registers" in compiler.compile_log(GATHER, "sm_70", tmp_path)
    assert not list(tmp_path.glob("tmp*"))


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    assert compiler.compile_instance(GATHER, "sm_70", taken / "folder")[:4] == b"\x7fELF"
    assert "gather is not kept: " in caplog.text


def test_code_is_for_one_card_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its own instructions are wanted; what goes by PTX runs anywhere."""
    asked: list[str] = []

    def compile_source(_name: str, _text: str, _flags: list[str], arch: str) -> tuple[bytes, str]:
        asked.append(arch)
        return b"", ""

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    for arch in ("sm_80", "sm_90", "sm_100", "compute_70"):
        compiler.compile_instance(GATHER, arch, tmp_path)
    assert asked == ["sm_80", "sm_90a", "sm_100", "compute_70"]


def test_what_changes_code_changes_its_name() -> None:
    names = {
        compiler.digest(GATHER, "sm_70"),
        compiler.digest(GATHER, "sm_75"),
        compiler.digest(Instance("elementwise.cu", "gather", (("A", "1"),)), "sm_70"),
        compiler.digest(Instance("elementwise.cu", "gather", (), True), "sm_70"),
    }
    assert len(names) == 4
    assert len({compiler.ptx_name(each) for each in INSTANCES}) == len(INSTANCES)


def test_ptx(tmp_path: Path) -> None:
    text = compiler.compile_instance(GATHER, "compute_70", tmp_path)
    assert b".target sm_70" in text
    assert b".entry gather" in text


def test_a_mistake_is_told_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong.cuh").write_text("#pragma once\n\nint f() { return nothing; }\n")
    (tmp_path / "wrong.cu").write_text('#include "wrong.cuh"\n')
    monkeypatch.setattr(compiler, "CSRC", tmp_path)
    with pytest.raises(nvrtc.CompileError, match=r"wrong\.cuh\(3\): error.*nothing"):
        compiler.compile_instance(Instance("wrong.cu", "f"), "sm_70", tmp_path)


def test_all_at_once(tmp_path: Path) -> None:
    counts: list[int] = []
    some = INSTANCES[:2]
    assert len(compiler.compile_all(some, "sm_75", 2, tmp_path, counts.append)) == 2
    assert counts == [1, 2]
