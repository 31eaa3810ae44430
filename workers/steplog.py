"""A worker's Step log: what a gateway asked of it and what it answered.

A worker is a fold over this log: whoever runs the same Plan over it gets the same tokens. Layout,
little endian: for each message a u32 count of its frames, then for each a u32 length and its bytes.
Each life of a worker begins with its Ready, all slots empty; then come Steps in their order,
each before it was run and followed by the Results of its rounds, as many as were run.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import BinaryIO

_U32 = struct.Struct("<I")


class _TornError(Exception):
    """The log ends inside a message."""


def write(file: BinaryIO, frames: Sequence[bytes | memoryview]) -> None:
    """Append one message, whole even if the process dies next."""
    file.write(_U32.pack(len(frames)))
    for frame in frames:
        file.write(_U32.pack(len(frame)))
        file.write(frame)
    file.flush()


def read(file: BinaryIO) -> Iterator[list[bytes]]:
    """The frames of each message; an unfinished last one (the machine died) is left out."""
    while True:
        try:
            count = _number(file)
            frames = [_take(file, _number(file)) for _ in range(count)]
        except _TornError:
            return
        yield frames


def _number(file: BinaryIO) -> int:
    return int(_U32.unpack(_take(file, _U32.size))[0])


def _take(file: BinaryIO, length: int) -> bytes:
    data = file.read(length)
    if len(data) < length:
        raise _TornError
    return data
