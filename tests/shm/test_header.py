"""The bounded header parser: hand-written bytes, and what damaged or lying files get."""

from __future__ import annotations

import re
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from voltapile.shm.header import MAX_STRINGS, GgufError, parse

MINI = Path(__file__).parents[1] / "data" / "golden-mini" / "llama" / "model-f16.gguf"


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return u64(len(data)) + data


def info(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return string(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def build(
    pairs: list[bytes], infos: list[bytes], data: bytes = bytes(256), version: int = 3,
    alignment: int = 32, num_tensors: int = -1, num_keys: int = -1,
) -> bytes:  # fmt: skip
    head = b"GGUF" + u32(version)
    head += u64(len(infos) if num_tensors < 0 else num_tensors)
    head += u64(len(pairs) if num_keys < 0 else num_keys)
    head += b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


TENSOR = info("a", [4, 2], 0, 0)  # 32 bytes of float32


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type(version: int) -> None:
    pairs = [
        string("u8") + u32(0) + b"\xff",
        string("i8") + u32(1) + b"\xff",
        string("u16") + u32(2) + b"\x01\x02",
        string("i16") + u32(3) + b"\xfe\xff",
        string("u32") + u32(4) + u32(2**32 - 1),
        string("i32") + u32(5) + struct.pack("<i", -7),
        string("f32") + u32(6) + struct.pack("<f", 1.5),
        string("bool") + u32(7) + b"\x01",
        string("str") + u32(8) + string("héllo"),
        string("u64") + u32(10) + u64(2**64 - 1),
        string("i64") + u32(11) + struct.pack("<q", -(2**63)),
        string("f64") + u32(12) + struct.pack("<d", 0.1),
        string("ints") + u32(9) + u32(5) + u64(3) + struct.pack("<3i", 1, -2, 3),
        string("flags") + u32(9) + u32(7) + u64(2) + b"\x00\x01",
        string("texts") + u32(9) + u32(8) + u64(3) + string("a") + string("") + string("ß"),
        string("none") + u32(9) + u32(6) + u64(0),
    ]
    found = parse("f", build(pairs, [TENSOR], version=version)).metadata
    arrays = {key: found.pop(key) for key in ("ints", "flags", "none")}
    assert found == {
        "u8": 255, "i8": -1, "u16": 0x201, "i16": -2, "u32": 2**32 - 1, "i32": -7, "f32": 1.5,
        "bool": True, "str": "héllo", "u64": 2**64 - 1, "i64": -(2**63), "f64": 0.1,
        "texts": ["a", "", "ß"],
    }  # fmt: skip
    assert type(found["bool"]) is bool
    assert arrays["ints"].tolist() == [1, -2, 3]
    assert arrays["ints"].dtype == np.int32
    assert arrays["flags"].tolist() == [False, True]
    assert arrays["flags"].dtype == np.bool_
    assert arrays["none"].size == 0


def test_tensor_places_and_alignment() -> None:
    pairs = [string("general.alignment") + u32(4) + u32(64)]
    infos = [info("q", [256, 3], 12, 0), info("b", [5], 0, 448)]
    data = build(pairs, infos, bytes(512), alignment=64)
    q, b = parse("f", data, shard=2).tensors
    assert (q.name, q.type_name, q.shape, q.nbytes, q.shard) == ("q", "Q4_K", (3, 256), 432, 2)
    assert (b.shape, b.nbytes) == ((5,), 20)
    assert q.offset == len(data) - 512
    assert b.offset == q.offset + 448


def test_tokens_that_are_not_utf8_survive() -> None:
    pairs = [string("t") + u32(9) + u32(8) + u64(1) + string(b"\xff\xfe")]
    (token,) = parse("f", build(pairs, [])).metadata["t"]
    assert token.encode("utf-8", "surrogateescape") == b"\xff\xfe"


KEY = string("k") + u32(4) + u32(1)
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "byte 0: the file is empty"),
    "magic": (b"GGML" + bytes(60), "byte 0: found b'GGML', expected the magic b'GGUF'"),
    "version 1": (build([], [], version=1), r"byte 4: found GGUF version 1, expected"),
    "big endian": (b"GGUF\0\0\0\3" + bytes(16), "byte 4: .* looks like a big-endian file"),
    "tensor count": (build([], [], num_tensors=2**40), "byte 8: found 1099511627776"),
    "key count": (build([], [], num_keys=2**40), "byte 16: found 1099511627776"),
    "fewer keys": (build([KEY], [], b"", num_keys=9), "byte [0-9]+: "),
    "fewer tensors": (build([], [TENSOR], b"", num_tensors=9), "byte [0-9]+: "),
    "key length": (build([u64(2**63)], []), "byte 24: found 9223372036854775808 as length of"),
    "empty key": (build([string("") + u32(4) + u32(1)], []), "byte 24: found an empty string"),
    "key not UTF-8": (build([string(b"\xff") + u32(4) + u32(1)], []), "byte 32: .* is not UTF-8"),
    "same key": (build([KEY, KEY], []), "byte 41: metadata key 'k' occurs twice"),
    "value type": (build([string("k") + u32(99)], []), "byte 33: found value type 99"),
    "bool": (build([string("k") + u32(7) + b"\x02"], []), "found 2 .* expected a bool"),
    "long string": (build([string("k") + u32(8) + u64(2**62)], []), "takes 4611686018427387904"),
    "nested": (build([string("k") + u32(9) + u32(9) + u64(1)], []), "an array of arrays"),
    "element type": (build([string("k") + u32(9) + u32(13) + u64(1)], []), "element type 13"),
    "long array": (build([string("k") + u32(9) + u32(4) + u64(2**61)], []), "the array 'k' takes"),
    "many strings": (build([string("k") + u32(9) + u32(8) + u64(2**40)], []), "1099511627776 str"),
    "strings end": (
        build([string("k") + u32(9) + u32(8) + u64(2) + u64(8)], [], bytes(12), alignment=1),
        "the file ends inside the array 'k'",
    ),
    "string length": (
        build([string("k") + u32(9) + u32(8) + u64(1) + u64(2**63)], []),
        "string 0 of the array 'k' ends beyond the file",
    ),
    "alignment 0": (build([string("general.alignment") + u32(4) + u32(0)], []), "alignment = 0"),
    "alignment 24": (build([string("general.alignment") + u32(4) + u32(24)], []), "power of two"),
    "alignment text": (build([string("general.alignment") + u32(8) + string("x")], []), "'x'"),
    "same tensor": (build([], [TENSOR, TENSOR]), "byte 65: tensor 'a' occurs twice"),
    "no dims": (build([], [info("a", [], 0, 0)]), "'a' has 0 dimensions, expected 1 to 4"),
    "5 dims": (build([], [info("a", [1] * 5, 0, 0)]), "'a' has 5 dimensions, expected 1 to 4"),
    "zero dim": (build([], [info("a", [4, 0], 0, 0)]), r"dimensions \[4, 0\], expected 1 to"),
    "huge dims": (build([], [info("a", [2**33] * 4, 0, 0)]), "expected 1 to 2\\^63 values"),
    "tensor type": (build([], [info("a", [4], 77, 0)]), "unknown tensor type 77; supported: 0 F32"),
    "no blocks": (build([], [info("a", [48], 2, 0)]), "rows of 48 .* Q4_0's block of 32"),
    "unaligned": (build([], [info("a", [4], 0, 16)]), "offset 16, expected a multiple of 32"),
    "far": (build([], [info("a", [4], 0, 2**50)]), "but the file has .* truncated"),
    "overlap": (
        build([], [info("a", [16], 0, 0), info("b", [8], 0, 32)]),
        "'b' overlaps 'a'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files_get_one_error(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(GgufError, match=message) as caught:
        parse("f", data)
    assert re.match("f: byte [0-9]+: ", str(caught.value))


def measured(run: Callable[[], Any]) -> tuple[float, int]:
    tracemalloc.start()
    began = time.perf_counter()
    try:
        run()
    finally:
        seconds = time.perf_counter() - began
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return seconds, peak


def test_lies_cost_neither_time_nor_memory() -> None:
    """A large file whose counts are as high as its size permits."""
    size = 64 << 20
    lies = [
        build([string("k") + u32(9) + u32(8) + u64(2**23)], [], bytes(size)),
        build([string("k") + u32(9) + u32(8) + u64(MAX_STRINGS - 1)], [], bytes(1 << 20)),
        build([], [], bytes(size), num_tensors=2**20),
        build([], [], bytes(size), num_keys=2**20),
    ]
    for data in lies:

        def run(data: bytes = data) -> None:
            with pytest.raises(GgufError):
                parse("f", data)

        seconds, peak = measured(run)
        assert seconds < 1
        assert peak < 1 << 20


def test_every_truncation_of_a_header() -> None:
    data = MINI.read_bytes()
    end = parse("f", data).tensors[0].offset
    for length in [*range(600), *range(600, end, 37), len(data) - 1]:
        with pytest.raises(GgufError, match=r"^f: byte "):
            parse("f", data[:length])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_flipped_bytes_parse_or_fail_cleanly(data: st.DataObject) -> None:
    original = MINI.read_bytes()
    end = parse("f", original).tensors[0].offset
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    message = "f: byte "
    try:
        tensors = parse("f", bytes(damaged)).tensors
    except GgufError as error:
        message, tensors = str(error), []
    assert message.startswith("f: byte ")
    assert all(tensor.offset + tensor.nbytes <= len(damaged) for tensor in tensors)


@pytest.mark.parametrize("padding", [0, 24])
def test_a_joined_file_is_refused(padding: int) -> None:
    one = build([], [TENSOR], bytes(32 + padding))
    assert len(parse("one", one).tensors) == 1
    with pytest.raises(GgufError, match=f"byte {len(one)}: another GGUF file begins here"):
        parse("two", one + one)
