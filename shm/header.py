"""The header of one GGUF file: a bounded parser over its mapped bytes.

Every count and length is checked against what the file can hold before anything is allocated, so
a damaged or lying file gives one GgufError, fast and with flat memory. Knows nothing of models,
nor of the other shards of a split file.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from voltapile.shm.formats import FORMATS

Buffer = Any  # bytes or mmap.mmap

VERSIONS = (2, 3)
ALIGNMENT = 32
MAX_DIMS = 4
MAX_PADDING = 4096  # after a file's last tensor
MAX_KEY_BYTES = 65535  # the specification's limit; also taken for tensor names
# No real header comes near these; they keep a file that lies from costing time and memory.
MAX_HEADER_BYTES = 256 << 20
MAX_STRINGS = 4 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17

STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_SCALARS = {kind: struct.Struct("<" + dtype.char) for kind, dtype in NUMBERS.items()}
_SCALARS |= {10: struct.Struct("<Q"), 11: struct.Struct("<q")}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class GgufError(ValueError):
    """A file that cannot be read as GGUF: which one, where, what was found and expected."""


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies. shape is numpy's order (rows, columns); offset is in the file."""

    name: str
    type_name: str
    type_id: int
    shape: tuple[int, ...]
    nbytes: int
    shard: int
    offset: int


@dataclass(frozen=True)
class Header:
    """What one file says of itself."""

    version: int
    metadata: dict[str, Any]
    tensors: list[Tensor]


class _Cursor:
    """Reads forward through `data`; every failure names the file and the byte offset."""

    def __init__(self, path: str, data: Buffer) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.end = min(self.size, MAX_HEADER_BYTES)
        self.at = 0
        self.strings_left = MAX_STRINGS

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        raise GgufError(f"{self.path}: byte {self.at if at is None else at}: {message}")

    def need(self, count: int, what: str) -> int:
        """Skip `count` bytes that the file must hold; returns where they began."""
        at = self.at
        if count > self.end - at:
            limit = "in the file" if self.end == self.size else "allowed for a header"
            self.fail(f"{what} takes {count} bytes, but only {self.end - at} more are {limit}")
        self.at = at + count
        return at

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.need(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.need(8, what))[0])

    def count(self, limit: int, what: str) -> int:
        at = self.at
        found = self.u64(what)
        if found > limit:
            self.fail(f"found {found} as {what}, expected at most {limit}", at)
        return found

    def name(self, what: str) -> str:
        """A key or a tensor name: short, not empty, UTF-8."""
        at = self.at
        length = self.count(MAX_KEY_BYTES, f"length of {what}")
        start = self.need(length, what)
        try:
            text = self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8", start)
        if not text:
            self.fail(f"found an empty string, expected {what}", at)
        return str(text)

    def text(self, what: str) -> str:
        length = self.u64(f"length of {what}")
        start = self.need(length, what)
        return str(self.data[start : start + length].decode("utf-8", "surrogateescape"))

    def texts(self, count: int, what: str) -> list[str]:
        """Strings of an array. Inlined, since vocabularies have hundreds of thousands."""
        if count > self.strings_left:
            self.fail(f"{what} has {count} strings, expected at most {self.strings_left}")
        self.need(8 * count, what)
        self.at -= 8 * count
        self.strings_left -= count
        data, at, end, unpack = self.data, self.at, self.end, _U64.unpack_from
        texts: list[str] = []
        for _ in range(count):
            if end - at < 8:
                self.fail(f"the file ends inside {what}", at)
            start = at + 8
            at = start + unpack(data, at)[0]
            if at > end:
                self.fail(f"string {len(texts)} of {what} ends beyond the file", start - 8)
            texts.append(data[start:at].decode("utf-8", "surrogateescape"))
        self.at = at
        return texts


def parse(path: str, data: Buffer, shard: int = 0) -> Header:
    """The header in `data`, the bytes of the file at `path`. Raises GgufError."""
    cursor = _Cursor(path, data)
    version = _version(cursor)
    num_tensors = cursor.count(MAX_TENSORS, "the number of tensors")
    num_keys = cursor.count(MAX_KEYS, "the number of metadata keys")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        at = cursor.at
        key = cursor.name("a metadata key")
        if key in metadata:
            cursor.fail(f"metadata key {key!r} occurs twice", at)
        metadata[key] = _value(cursor, key)
    alignment = _alignment(cursor, metadata)
    infos: dict[str, tuple[Tensor, int]] = {}  # with the place of each record, for messages
    for _ in range(num_tensors):
        at = cursor.at
        tensor = _tensor(cursor, shard, alignment)
        if tensor.name in infos:
            cursor.fail(f"tensor {tensor.name!r} occurs twice", at)
        infos[tensor.name] = tensor, at
    base = -(-cursor.at // alignment) * alignment
    return Header(version, metadata, _placed(cursor, list(infos.values()), base))


def _version(cursor: _Cursor) -> int:
    if not cursor.size:
        cursor.fail("the file is empty, expected a GGUF file")
    magic = bytes(cursor.data[:4])
    if magic != b"GGUF":
        cursor.fail(f"found {magic!r}, expected the magic b'GGUF': this is not a GGUF file")
    cursor.at = 4
    version = cursor.u32("the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        hint = ", so this looks like a big-endian file" if swapped in VERSIONS else ""
        cursor.fail(f"found GGUF version {version}{hint}, expected one of {VERSIONS}", 4)
    return version


def _value(cursor: _Cursor, key: str) -> Any:
    at = cursor.at
    kind = cursor.u32(f"the type of {key!r}")
    what = f"the value of {key!r}"
    if kind == STRING:
        return cursor.text(what)
    if kind == ARRAY:
        return _array(cursor, key)
    if kind not in NUMBERS:
        cursor.fail(f"found value type {kind} for {key!r}, expected 0 to 12", at)
    scalar = _SCALARS[kind]
    start = cursor.need(scalar.size, what)
    value = scalar.unpack_from(cursor.data, start)[0]
    if kind != BOOL:
        return value
    if value > 1:
        cursor.fail(f"found {value} as {what}, expected a bool (0 or 1)", start)
    return bool(value)


def _array(cursor: _Cursor, key: str) -> Any:
    at = cursor.at
    kind = cursor.u32(f"the element type of {key!r}")
    what = f"the array {key!r}"
    if kind == ARRAY:
        cursor.fail(f"found an array of arrays in {key!r}, expected numbers or strings", at)
    if kind != STRING and kind not in NUMBERS:
        cursor.fail(f"found element type {kind} in {key!r}, expected 0 to 12", at)
    count = cursor.u64(f"the length of {what}")
    if kind == STRING:
        return cursor.texts(count, what)
    dtype = NUMBERS[kind]
    start = cursor.need(count * dtype.itemsize, what)
    array = np.frombuffer(cursor.data, dtype, count, start).copy()
    if kind != BOOL:
        return array
    if array.size and array.max() > 1:
        cursor.fail(f"{what} holds {array.max()}, expected bools (0 or 1)", start)
    return array.astype(np.bool_)


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    found = metadata.get("general.alignment", ALIGNMENT)
    is_valid = isinstance(found, int) and not isinstance(found, bool) and found > 0
    if not is_valid or found & (found - 1):
        cursor.fail(f"found general.alignment = {found!r}, expected a power of two")
    return int(found)


def _tensor(cursor: _Cursor, shard: int, alignment: int) -> Tensor:
    """One record of the tensor table; its offset is still relative to the data."""
    name = cursor.name("a tensor name")
    at = cursor.at
    num_dims = cursor.u32(f"the number of dimensions of {name!r}")
    if not 1 <= num_dims <= MAX_DIMS:
        cursor.fail(f"{name!r} has {num_dims} dimensions, expected 1 to {MAX_DIMS}", at)
    at = cursor.at
    dims = [cursor.u64(f"dimension {i} of {name!r}") for i in range(num_dims)]
    type_at = cursor.at
    kind = FORMATS.get(type_id := cursor.u32(f"the type of {name!r}"))
    if kind is None:
        known = ", ".join(f"{each.id} {each.name}" for each in FORMATS.values())
        cursor.fail(f"{name!r} has unknown tensor type {type_id}; supported: {known}", type_at)
    values = 1
    for dim in dims:
        values *= dim
    if not 0 < values < 1 << 63:
        cursor.fail(f"{name!r} has dimensions {dims}, expected 1 to 2^63 values", at)
    if dims[0] % kind.block_len:
        cursor.fail(
            f"{name!r} has rows of {dims[0]} values, expected a multiple of {kind.name}'s block "
            f"of {kind.block_len}",
            at,
        )
    at = cursor.at
    offset = cursor.u64(f"the offset of {name!r}")
    if offset % alignment:
        cursor.fail(f"{name!r} lies at offset {offset}, expected a multiple of {alignment}", at)
    nbytes = values // kind.block_len * kind.block_bytes
    return Tensor(name, kind.name, type_id, tuple(reversed(dims)), nbytes, shard, offset)


def _placed(cursor: _Cursor, infos: list[tuple[Tensor, int]], base: int) -> list[Tensor]:
    """Tensors with absolute offsets, after checking that they lie in the file and apart."""
    placed: list[Tensor] = []
    for tensor, at in infos:
        begin = base + tensor.offset
        if begin + tensor.nbytes > cursor.size:
            cursor.fail(
                f"tensor {tensor.name!r} would lie at bytes {begin} to {begin + tensor.nbytes}, "
                f"but the file has {cursor.size}: it is truncated or damaged",
                at,
            )
        placed.append(replace(tensor, offset=begin))
    ordered = sorted(placed, key=lambda each: each.offset)
    for first, second in itertools.pairwise(ordered):
        if first.offset + first.nbytes > second.offset:
            cursor.fail(
                f"tensor {second.name!r} overlaps {first.name!r}, which ends at byte "
                f"{first.offset + first.nbytes}",
                second.offset,
            )
    _refuse_another(cursor, max((each.offset + each.nbytes for each in placed), default=base))
    return placed


def _refuse_another(cursor: _Cursor, end: int) -> None:
    """No second GGUF may follow the data: files that were joined give their first part only."""
    at = bytes(cursor.data[end : end + MAX_PADDING]).find(b"GGUF")
    if at >= 0 and not any(cursor.data[end : end + at]):
        cursor.fail("another GGUF file begins here, expected one: were two joined?", end + at)
