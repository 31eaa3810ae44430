"""Gguf against the independent reader of the gguf package, split files, and access helpers."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf as independent
import numpy as np
import pytest
from voltapile.shm.gguf import Gguf, GgufError

TESTS = Path(__file__).parents[1]
MINIS = sorted((TESTS / "data" / "golden-mini").glob("*/*.gguf"))
LARGE = sorted((TESTS.parents[1] / "shared" / "golden").glob("*/*.gguf"))
LLAMA = TESTS / "data" / "golden-mini" / "llama" / "model-f16.gguf"


@pytest.fixture
def llama() -> Iterator[Gguf]:
    with Gguf.open(LLAMA) as gguf:
        yield gguf


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, np.ndarray):
        return bool(found.tolist() == expected)
    return bool(found == expected and type(found) is type(expected))


@pytest.mark.parametrize("path", MINIS + LARGE, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_agrees_with_the_independent_reader(path: Path) -> None:
    reader = independent.GGUFReader(path)
    with Gguf.open(path) as gguf:
        fields = {k: v.contents() for k, v in reader.fields.items() if not k.startswith("GGUF.")}
        assert gguf.metadata.keys() == fields.keys()
        for key, expected in fields.items():
            assert same(gguf.metadata[key], expected), key
        assert list(gguf.tensors) == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            mine = gguf.tensors[tensor.name]
            assert mine.type_name == tensor.tensor_type.name
            assert mine.shape == tuple(reversed(tensor.shape.tolist()))
            assert (mine.offset, mine.nbytes) == (tensor.data_offset, tensor.n_bytes)
            assert np.array_equal(gguf.data(tensor.name), tensor.data.view(np.uint8).reshape(-1))


def test_views_are_read_only_and_outlive_close() -> None:
    gguf = Gguf.open(LLAMA)
    data = gguf.data("output_norm.weight")
    assert not data.flags.writeable
    before = data.tobytes()
    gguf.close()
    gguf.close()
    assert data.tobytes() == before
    with pytest.raises(GgufError, match="has been closed"):
        gguf.data("output_norm.weight")


def test_get(llama: Gguf) -> None:
    assert llama.architecture == "llama"
    assert llama.get("llama.block_count", kind=int) == 4
    assert llama.get("llama.block_count", kind=float) == 4.0
    assert llama.get("absent", 7, int) == 7
    assert llama.get("tokenizer.ggml.token_type", kind=list)[:2] == [1, 1]
    with pytest.raises(GgufError, match=r"model-f16.gguf: metadata key 'absent' \(int\) is missi"):
        llama.get("absent", kind=int)
    with pytest.raises(GgufError, match=r"'general.name' is str 'Mini Llama', expected int"):
        llama.get("general.name", kind=int)
    with pytest.raises(GgufError, match=r"'tokenizer.ggml.tokens' is an array of .*, expected str"):
        llama.get("tokenizer.ggml.tokens", kind=str)
    with pytest.raises(GgufError, match=r"'llama.rope.freq_base' is float 500000.0, expected int"):
        llama.get("llama.rope.freq_base", kind=int)
    with pytest.raises(GgufError, match="no tensor 'nonsense'"):
        llama.data("nonsense")


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "fifo")
    for name, message in {
        "missing": "cannot open: No such file",
        "": "found a directory",
        "empty": "byte 0: the file is empty",
        "fifo": "not a regular file",
        "nul\0": "embedded null byte",
    }.items():
        with pytest.raises(GgufError, match=message):
            Gguf.open(str(tmp_path / name) if name else str(tmp_path))


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    shutil.copy(LLAMA, tmp_path / "m.gguf")
    (tmp_path / "m.gguf").chmod(0)
    with pytest.raises(GgufError, match="cannot open: Permission denied"):
        Gguf.open(tmp_path / "m.gguf")


def test_a_large_vocabulary_is_fast(tmp_path: Path) -> None:
    writer = independent.GGUFWriter(tmp_path / "m.gguf", "llama")
    tokens = [f"token {i}" for i in range(250_000)]
    writer.add_token_list(tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    began = time.perf_counter()
    with Gguf.open(tmp_path / "m.gguf") as gguf:
        assert time.perf_counter() - began < 1
        assert gguf.metadata["tokenizer.ggml.tokens"] == tokens
        assert gguf.tensors == {}


# --- split files ------------------------------------------------------------------------------


def write_shards(
    folder: Path, count: int = 3, changes: dict[int, dict[str, int]] | None = None
) -> list[Path]:
    """Two tensors in each shard; changes: split keys of one shard, by its index."""
    paths = []
    for index in range(count):
        path = folder / f"big-{index + 1:05}-of-{count:05}.gguf"
        writer = independent.GGUFWriter(path, "llama")
        split = {"no": index, "count": count, "tensors.count": 2 * count}
        split |= (changes or {}).get(index, {})
        writer.add_uint16("split.no", split["no"])
        writer.add_uint16("split.count", split["count"])
        writer.add_int32("split.tensors.count", split["tensors.count"])
        if index == 0:
            writer.add_string("general.name", "Big")
        for part in "ab":
            writer.add_tensor(f"{part}.{index}", np.full((2, 4), index, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_shards_are_found_from_any_of_them(tmp_path: Path, given: int) -> None:
    paths = write_shards(tmp_path)
    with Gguf.open(paths[given]) as gguf:
        assert gguf.path == str(paths[given])
        assert gguf.paths == [str(path) for path in paths]
        assert gguf.get("general.name") == "Big"
        assert list(gguf.tensors) == ["a.0", "b.0", "a.1", "b.1", "a.2", "b.2"]
        for index in range(3):
            assert gguf.tensors[f"b.{index}"].shard == index
            assert (gguf.data(f"b.{index}").view(np.float32) == index).all()


def test_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path)
    monkeypatch.chdir(tmp_path)
    with Gguf.open("big-00002-of-00003.gguf") as gguf:
        assert len(gguf.tensors) == 6


def test_missing_shard_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[2].unlink()
    with pytest.raises(GgufError, match=r"big-00003-of-00003.gguf: shard 3 of 3 is missing"):
        Gguf.open(paths[0])


def test_damaged_shard_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[1].write_bytes(b"GGUF")
    with pytest.raises(GgufError, match=r"big-00002-of-00003.gguf: byte 4: the version takes 4"):
        Gguf.open(paths[0])


def test_renamed_shard_says_what_name_it_needs(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[1].rename(tmp_path / "model.gguf")
    with pytest.raises(GgufError, match="shard 2 of 3, expected a name that ends in -00002-of-000"):
        Gguf.open(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({1: {"no": 2}}, r"00002-of-00003.gguf: split.no is 2, expected 1"),
        ({2: {"count": 4}}, r"00003-of-00003.gguf: split.count is 4, expected 3"),
        ({0: {"tensors.count": 9}}, "3 shards hold 6 tensors, expected 9"),
    ],
)
def test_shards_that_disagree(
    tmp_path: Path, changes: dict[int, dict[str, int]], message: str
) -> None:
    paths = write_shards(tmp_path, changes=changes)
    with pytest.raises(GgufError, match=message):
        Gguf.open(paths[0])


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, 2)
    data = paths[1].read_bytes().replace(b"a.1", b"a.0")
    paths[1].write_bytes(data)
    with pytest.raises(GgufError, match=r"tensor 'a.0' is also in .*00001-of-00002"):
        Gguf.open(paths[0])
