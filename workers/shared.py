"""Tensors that lie in host memory once for all ranks of a Plan, and that each of them reads there.

One Segment, filled by all ranks together, each a part. Its name is that of the group, so it is new
at every start, and it has no name any longer once all have it: a crash leaves nothing behind. Knows
files and shared memory; how a device reads it is the backend's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from voltapile.kernels.group import Group, shared_memory
from voltapile.shm.gguf import Gguf
from voltapile.shm.segment import Segment, SegmentError
from voltapile.topology.placement import TABLE
from voltapile.topology.plan import Plan

Progress = Callable[[float], None]
PAGE = 4096
PIECE = 32 << 20  # bytes between two signs of life


@contextlib.contextmanager
def shared_tensors(
    plan: Plan, gguf: Gguf, rank: int, group: Group | None, progress: Progress
) -> Iterator[Mapping[str, np.ndarray]]:
    """The bytes of each tensor that the Plan shares, each from a page's beginning on. group: None
    where there is one rank. Raises SegmentError."""
    if not plan.shared:
        yield {}
        return
    starts, end = {}, 0
    for name in plan.shared:
        starts[name] = end
        end += -(-gguf.tensors[name].nbytes // PAGE) * PAGE
    nodes = sorted({each.node for each in plan.ranks if each.node >= 0})
    try:
        if group is None:
            segment = Segment.create(plan.id, "tensors", end, nodes=nodes, huge=True)
            segment.unlink()
        else:
            segment = shared_memory(group, end, "tensors", nodes, huge=True)
    except SegmentError as error:
        raise SegmentError(f"{error}; {_remedy(plan)}") from None
    try:
        found = {
            name: segment.array(np.uint8, (gguf.tensors[name].nbytes,), start)
            for name, start in starts.items()
        }
        for name, memory in found.items():
            _fill(memory, gguf.data(name), rank, len(plan.ranks), progress)
            gguf.forget(name)
        if group is not None:
            group.exchange(b"")  # all have written their part
        yield found
    finally:
        segment.close()


def _remedy(plan: Plan) -> str:
    """What needs less shared memory."""
    if TABLE in plan.shared:
        return "or leave the n-gram table in the file: --ngram-table mapped"
    return "or keep the embedding in VRAM: -ot embed=vram"


def _fill(memory: np.ndarray, data: np.ndarray, rank: int, ranks: int, progress: Progress) -> None:
    """This rank's part of a tensor's bytes."""
    data = data.reshape(-1).view(np.uint8)
    begin, end = (len(data) * each // ranks for each in (rank, rank + 1))
    for start in range(begin, end, PIECE):
        stop = min(start + PIECE, end)
        memory[start:stop] = data[start:stop]
        progress((stop - begin) / (end - begin))
