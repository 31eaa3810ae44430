"""voltapile bench: what it prints, and that two of them wait for each other."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from voltapile.gateway.cli import bench, main
from voltapile.shm.gguf import Gguf

KEYS = [
    "engine",
    "threads",
    "prompt",
    "prefill_tok_s",
    "generate",
    "decode_tok_s",
    "all_prefill",
    "all_decode",
    "streams",
]


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_json_has_the_keys_of_the_other_benches(
    mini: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(mini / "llama/model-f16.gguf")
    before = os.sched_getaffinity(0)
    argv = ["bench", "-m", model, "-p", "70", "-n", "5", "-r", "2", "-t", "1", "--json"]
    assert main.main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == KEYS
    assert (found["threads"], found["prompt"], found["generate"]) == (1, 70, 5)
    assert found["prefill_tok_s"] > 0 < found["decode_tok_s"]
    assert len(found["all_prefill"]) == len(found["all_decode"]) == 2
    assert os.sched_getaffinity(0) == before


def test_prompts_may_begin_behind_filled_caches(
    mini: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(mini / "llama/model-f16.gguf")
    argv = ["bench", "-m", model, "-p", "8", "-n", "3", "-r", "1", "-t", "1", "-d", "640"]
    assert main.main([*argv, "-npl", "2"]) == 0
    head, _, row = (line.split("|")[1:4] for line in capsys.readouterr().out.splitlines())
    assert [cell.strip() for cell in head] == ["threads", "streams", "depth"]
    assert [cell.strip() for cell in row] == ["1", "2", "640"]


def test_a_failure_prints_no_table(mini: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "-m", str(mini / "missing.gguf")]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "missing.gguf" in printed.err


def test_a_row_for_each_thread_count_and_number_of_streams(
    mini: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(mini / "llama/model-f16.gguf")
    argv = ["bench", "-m", model, "-p", "8", "-n", "2", "-r", "1", "-t", "1,2", "-npl", "1,3"]
    assert main.main(argv) == 0
    cells = [line.split("|") for line in capsys.readouterr().out.splitlines()]
    found = [(cell[1].strip(), cell[2].strip()) for cell in cells]
    rows = [(threads, streams) for threads in "12" for streams in "13"]
    assert found == [("threads", "streams"), ("---", "---"), *rows]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["-t", "1,2", "--json"], "one thread count"),
        (["-npl", "1,2", "--json"], "one --streams"),
        (["-npl", "0"], "at least 1"),
        (["-d", "100"], "multiple of 64"),
        (["-p", "0"], "at least 1"),
        (["-p", "100", "-c", "64"], "context of 64"),
        (["-m", "nothing.gguf"], "nothing.gguf"),
    ],
)
def test_bad_options(
    mini: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    model = str(mini / "llama/model-f16.gguf")
    assert main.main(["bench", "-m", model, *extra]) == (1 if "nothing.gguf" in message else 2)
    assert message in capsys.readouterr().err


def test_the_lock_is_held(tmp_path: Path) -> None:
    with (
        bench.machine_lock(),
        (tmp_path / bench.LOCK).open() as other,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / bench.LOCK).open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_prompts_hold_no_special_token(mini: Path) -> None:
    with Gguf.open(mini / "llama/model-f16.gguf") as gguf:
        ids = bench.ordinary_ids(gguf)
        kinds = np.asarray(gguf.metadata["tokenizer.ggml.token_type"])
    assert len(ids) > 500
    assert set(kinds[ids]) == {bench.NORMAL_TOKEN}
