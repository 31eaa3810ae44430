"""Collectives in plain numpy over shared memory: what the other backends must agree with.

Every rank writes its floats where all can see them, counts up, waits until all have, and reads.
Knows nothing of speed: a wait is a loop with pauses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from voltapile.kernels.group import Array, Group, shared_memory, wait_until

ROOM = 512 << 10  # bytes of a rank for each rank: half for sums, half for messages
SLOTS = 2  # messages under way from one rank to another


class Meeting:
    """Shared memory of a group, and how far each rank has come in it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        ranks, counters = group.ranks, 3 * group.ranks * group.ranks
        half = ranks * ROOM // 4
        self._segment = shared_memory(group, 8 * counters + ranks * ranks * ROOM)
        counts = self._segment.array(np.int64, (3, ranks, ranks))
        self._rounds, self._sent, self._taken = counts[0, 0], counts[1], counts[2]
        self._halves = self._segment.array(np.uint8, (2, ranks, half), 8 * counters)
        rings = 8 * counters + self._halves.nbytes
        shape = ranks, ranks, SLOTS, ROOM // 2 // SLOTS
        self._rings = self._segment.array(np.uint8, shape, rings)

    def share(self, mine: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
        """The uint8 arrays of all ranks, of which this rank's is `mine`."""
        found = [np.empty(length, np.uint8) for length in lengths]
        step = self._halves.shape[2]
        for at in range(0, max(lengths), step):
            halves = self._halves[(self._rounds[self.group.rank] + 1) % 2]
            part = mine[at : at + step]
            halves[self.group.rank, : len(part)] = part
            self._meet()
            for rank, whole in enumerate(found):
                part = whole[at : at + step]
                part[...] = halves[rank, : len(part)]
        return found

    def _meet(self) -> None:
        rounds = self._rounds
        rounds[self.group.rank] += 1
        mine = int(rounds[self.group.rank])
        wait_until(
            self.group, lambda: bool((rounds >= mine).all()), lambda: int(rounds.argmin()), "come"
        )

    def send(self, data: np.ndarray, target: int) -> None:
        at = self.group.rank, target
        step = self._rings.shape[3]
        for begin in range(0, len(data), step):
            number = int(self._sent[at])
            self._wait(self._taken, at, number + 1 - SLOTS, target, "taken what was sent")
            part = data[begin : begin + step]
            self._rings[at][number % SLOTS, : len(part)] = part
            self._sent[at] += 1

    def receive(self, data: np.ndarray, source: int) -> None:
        at = source, self.group.rank
        step = self._rings.shape[3]
        for begin in range(0, len(data), step):
            number = int(self._taken[at])
            self._wait(self._sent, at, number + 1, source, "sent anything")
            part = data[begin : begin + step]
            part[...] = self._rings[at][number % SLOTS, : len(part)]
            self._taken[at] += 1

    def _wait(
        self, counts: np.ndarray, at: tuple[int, int], target: int, other: int, what: str
    ) -> None:
        wait_until(self.group, lambda: bool(counts[at] >= target), lambda: other, what)


class ReferenceCollectives:
    """The part of ReferenceOps that concerns other ranks; see kernels/group.py."""

    _meeting: Meeting | None = None

    def join(self, group: Group) -> None:
        self._meeting = Meeting(group)

    def all_reduce(
        self, part: np.ndarray | None, shape: tuple[int, int], add_to: np.ndarray | None = None
    ) -> Array:
        mine = np.zeros(shape, np.float32) if part is None else part
        parts = self._all(mine, [mine.nbytes] * self._ranks)
        total = parts[0].reshape(shape)
        for other in parts[1:]:
            total = total + other.reshape(shape)
        if add_to is None:
            return total
        add_to += total
        return add_to

    def all_gather(self, part: np.ndarray | None, rows: int, widths: Sequence[int]) -> Array:
        mine = np.zeros((rows, 0), np.float32) if part is None else part
        parts = self._all(mine, [4 * rows * width for width in widths])
        shaped = [x.reshape(rows, width) for x, width in zip(parts, widths, strict=True)]
        return np.concatenate(shaped, axis=1)

    def broadcast_(self, x: np.ndarray, source: int) -> None:
        if self._meeting is None:
            return
        is_source = self._meeting.group.rank == source
        data = _bytes(x)
        lengths = [data.nbytes if rank == source else 0 for rank in range(self._ranks)]
        found = self._meeting.share(data if is_source else data[:0], lengths)[source]
        data[...] = found

    def send(self, x: np.ndarray, target: int) -> None:
        assert self._meeting is not None, "alone"
        self._meeting.send(_bytes(x), target)

    def receive(self, shape: tuple[int, int], source: int) -> Array:
        assert self._meeting is not None, "alone"
        x = np.empty(shape, np.float32)
        self._meeting.receive(_bytes(x), source)
        return x

    def place(self, x: np.ndarray, width: int, offset: int) -> Array:
        return np.pad(x, ((0, 0), (offset, width - offset - x.shape[1])))

    @property
    def _ranks(self) -> int:
        return self._meeting.group.ranks if self._meeting else 1

    def _all(self, mine: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
        """The float32 parts of all ranks, flat."""
        if self._meeting is None:
            return [mine.reshape(-1).copy()]
        parts = self._meeting.share(_bytes(np.ascontiguousarray(mine)), lengths)
        return [part.view(np.float32) for part in parts]


def _bytes(x: np.ndarray) -> np.ndarray:
    assert x.flags.c_contiguous
    flat: np.ndarray = x.reshape(-1).view(np.uint8)
    return flat
