"""Gguf: a model file, all its shards mapped read-only; metadata, tensor table, tensor bytes.

Never copies the file and knows nothing of architectures. A split file is found from any of its
shards by the names `-00001-of-0000N.gguf`, and checked by its `split.*` metadata. Views from
`data` keep their map alive, so that closing a Gguf never pulls bytes away under a user.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from voltapile.shm.header import GgufError, Header, Tensor, parse

__all__ = ["REQUIRED", "Gguf", "GgufError", "Tensor"]

_SHARD_NAME = re.compile(r"^(?P<stem>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)
MAX_SHARDS = 1024


class _Required:
    """The default of a key that must be there."""

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = _Required()


class Gguf:
    """An open model. Tensors are in file order, shard by shard."""

    def __init__(
        self, path: str, paths: list[str], maps: list[mmap.mmap], headers: list[Header]
    ) -> None:
        self.path = path  # as given
        self.paths = paths
        self.version = headers[0].version
        self.metadata: Mapping[str, Any] = headers[0].metadata
        self.tensors: dict[str, Tensor] = {}
        self._maps = maps
        self._bytes = [np.frombuffer(each, np.uint8) for each in maps]
        for header, shard_path in zip(headers, paths, strict=True):
            for tensor in header.tensors:
                if tensor.name in self.tensors:
                    first = paths[self.tensors[tensor.name].shard]
                    raise GgufError(f"{shard_path}: tensor {tensor.name!r} is also in {first}")
                self.tensors[tensor.name] = tensor

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Gguf:
        """Map the model at `path` and its sibling shards. Raises GgufError."""
        given = os.fspath(path)
        first_map, first = _load(given, 0)
        siblings = _siblings(given, first)
        maps: list[mmap.mmap] = []
        headers: list[Header] = []
        for index, sibling in enumerate(siblings):
            if index == 0 and sibling == given:
                each_map, header = first_map, first
            else:
                each_map, header = _load(sibling, index)
            _check_shard(sibling, header, index, len(siblings))
            maps.append(each_map)
            headers.append(header)
        gguf = cls(given, siblings, maps, headers)
        _check_total(gguf)
        return gguf

    @property
    def architecture(self) -> str:
        """general.architecture, e.g. "llama"."""
        return str(self.get("general.architecture", kind=str))

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(each.nbytes for each in self.tensors.values())

    def forget(self, name: str) -> None:
        """Let go of the tensor's pages; they are read again from the page cache when needed."""
        tensor = self.tensors[name]
        begin = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = tensor.offset + tensor.nbytes - begin
        self._maps[tensor.shard].madvise(mmap.MADV_DONTNEED, begin, length)

    def data(self, name: str) -> np.ndarray:
        """uint8[nbytes]: the tensor's bytes, a read-only view of the map."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise GgufError(f"{self.path}: there is no tensor {name!r}")
        if not self._bytes:
            raise GgufError(f"{self.path}: the file has been closed")
        return self._bytes[tensor.shard][tensor.offset : tensor.offset + tensor.nbytes]

    def get(self, key: str, default: Any = REQUIRED, kind: type | None = None) -> Any:
        """A metadata value, as `kind`: bool, int, float, str, list or np.ndarray.

        Lenient about widths: any integer type serves as int, and as float; 0 and 1 as bool. An
        array of numbers is an np.ndarray, or with kind=list a list. Without a default the key
        must be there; anything else raises GgufError.
        """
        if key not in self.metadata:
            if default is REQUIRED:
                wanted = f" ({kind.__name__})" if kind else ""
                raise GgufError(f"{self.path}: metadata key {key!r}{wanted} is missing")
            return default
        value = self.metadata[key]
        if kind is None or type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        if kind is bool and type(value) is int and value in (0, 1):
            return bool(value)
        if kind is list and isinstance(value, np.ndarray):
            return value.tolist()
        found = f"{type(value).__name__} {value!r}"
        if isinstance(value, list | np.ndarray):
            found = f"an array of {len(value)}"
        elif isinstance(value, str):
            found = f"str {value[:40]!r}"
        raise GgufError(f"{self.path}: metadata key {key!r} is {found}, expected {kind.__name__}")

    def close(self) -> None:
        """Let go of the maps; they live on as long as views of them do."""
        self._bytes.clear()
        for each in self._maps:
            with contextlib.suppress(BufferError):  # a view is still in use
                each.close()
        self._maps.clear()

    def __enter__(self) -> Gguf:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _load(path: str, shard: int) -> tuple[mmap.mmap, Header]:
    """Map one file and read its header."""
    try:
        # Not blocking, since opening a FIFO would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise GgufError(f"{path}: cannot open: {reason}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise GgufError(f"{path}: found {kind}, expected a GGUF file")
        if not status.st_size:
            raise GgufError(f"{path}: byte 0: the file is empty, expected a GGUF file")
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise GgufError(f"{path}: cannot map: {error.strerror}") from None
    finally:
        os.close(descriptor)
    try:
        return mapped, parse(path, mapped, shard)
    except GgufError:
        mapped.close()
        raise


def _split(path: str, header: Header, key: str, default: int) -> int:
    value = header.metadata.get(f"split.{key}", default)
    if type(value) is not int:
        raise GgufError(f"{path}: metadata key 'split.{key}' is {value!r}, expected an integer")
    return value


def _siblings(path: str, header: Header) -> list[str]:
    """The paths of all shards in order, given one of them."""
    match = _SHARD_NAME.match(Path(path).name)
    count = _split(path, header, "count", int(match["count"]) if match else 1)
    if count <= 1:
        return [path]
    if count > MAX_SHARDS:
        raise GgufError(f"{path}: split.count is {count}, expected at most {MAX_SHARDS}")
    if not match or int(match["count"]) != count:
        number = _split(path, header, "no", 0) + 1
        raise GgufError(
            f"{path}: this is shard {number} of {count}, expected a name that ends in "
            f"-{number:05}-of-{count:05}.gguf, beside the other shards"
        )
    folder = os.path.dirname(path)
    names = [f"{match['stem']}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
    paths = [os.path.join(folder, name) for name in names]
    for index, sibling in enumerate(paths, start=1):
        if not os.path.exists(sibling):
            raise GgufError(f"{sibling}: shard {index} of {count} is missing (needed by {path})")
    return paths


def _check_shard(path: str, header: Header, index: int, count: int) -> None:
    if count == 1:
        return
    for key, expected in (("no", index), ("count", count)):
        found = _split(path, header, key, expected)
        if found != expected:
            raise GgufError(f"{path}: split.{key} is {found}, expected {expected} by its name")


def _check_total(gguf: Gguf) -> None:
    expected = gguf.get("split.tensors.count", len(gguf.tensors), int)
    if len(gguf.paths) > 1 and expected != len(gguf.tensors):
        raise GgufError(
            f"{gguf.path}: the {len(gguf.paths)} shards hold {len(gguf.tensors)} tensors, "
            f"expected {expected} (split.tensors.count)"
        )
