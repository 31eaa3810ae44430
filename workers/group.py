"""The ranks of one Plan, as an Ops meets them: who is there, and small data from each to all.

Everything goes through the Board, which all ranks have mapped. `meet` waits until every rank has
come in its present life: each writes a fresh number, and beside it those that it sees of the
others; they agree when all see the same. So nothing of a process that has died is ever believed,
and the group's name is new at every start. Knows neither devices nor what is computed.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from voltapile.kernels.group import GroupError
from voltapile.shm.board import HANDLE_BYTES, HANDLES, Board, exists

log = logging.getLogger(__name__)

START_SECONDS = 120.0  # from the first rank's coming to the last's
# For which one exchange may wait for a rank that lives: it loads, or is at another exchange.
EXCHANGE_SECONDS = 3600.0
# For which a rank may let others wait in a step, or show no life while loading, by backend. On CPUs
# a stage of layers may compute for long.
WAIT_SECONDS = {"cuda": 20.0, "cpu": 60.0, "reference": 600.0}
PAUSE_SECONDS = 1e-3
MOST_BYTES = 2048
MOST_RANKS = 56

_RECORD = np.dtype(
    {
        "names": ["lives", "written", "read", "length", "check", "data"],
        "formats": [("<u8", MOST_RANKS), "<i8", "<i8", "<u4", "<u4", ("u1", MOST_BYTES)],
        "offsets": [0, 448, 456, 464, 468, 512],
        "itemsize": HANDLES * HANDLE_BYTES,
    }
)


class BoardGroup:
    """A Group (kernels/group.py). Made by `meet`."""

    islands: Sequence[int] = ()
    faults: Sequence[tuple[int, int]] = ()

    def __init__(self, plan_id: str, board: Board, rank: int, seconds: float) -> None:
        assert board.num_ranks <= MOST_RANKS, board.num_ranks
        self.rank, self.ranks, self.seconds = rank, board.num_ranks, seconds
        self.abort_address = board.abort_address
        self.waits_for_address = board.waits_for_address(rank)
        self._board, self._plan_id = board, plan_id
        raw = [board.handles(other).reshape(-1) for other in range(self.ranks)]
        self._records = [record.view(_RECORD)[0] for record in raw]
        self._life = secrets.randbits(63) | 1
        self._number = 0

    @property
    def name(self) -> str:
        lives = self._records[self.rank]["lives"].tobytes()
        return f"{self._plan_id}-{hashlib.sha256(lives).hexdigest()[:16]}"

    def meet(self, seconds: float) -> None:
        """Wait until all ranks have come. Raises GroupError."""
        mine = self._records[self.rank]
        mine["written"] = mine["read"] = 0
        mine["lives"] = 0
        mine["lives"][self.rank] = self._life
        for waited in self._wait(self._stranger):
            self._look_around()
            if waited > seconds:
                other = self._stranger()
                raise GroupError(
                    f"rank {self.rank} has waited {waited:.0f} s for rank {other} to come; "
                    "is it started?"
                )

    def exchange(self, data: bytes) -> list[bytes]:
        """See kernels/group.py. Waits while the missing rank is alive, EXCHANGE_SECONDS at most."""
        assert len(data) <= MOST_BYTES, len(data)
        self._number += 1
        number, mine = self._number, self._records[self.rank]
        self._come("read", number - 1)
        mine["data"][: len(data)] = np.frombuffer(data, np.uint8)
        mine["length"], mine["check"] = len(data), zlib.crc32(data)
        mine["written"] = number
        self._come("written", number)
        found = [self._read(other) for other in range(self.ranks)]
        mine["read"] = number
        return found

    # --- private --------------------------------------------------------------------------
    def _look_around(self) -> None:
        mine = self._records[self.rank]
        for other, record in enumerate(self._records):
            life = record["lives"][other]
            if mine["lives"][other] != life:
                mine["lives"][other] = life

    def _stranger(self) -> int:
        """A rank that does not see what this one sees; -1: all do."""
        mine = self._records[self.rank]["lives"][: self.ranks]
        if not mine.all():
            return int(np.argmin(mine != 0))
        views = (np.array_equal(record["lives"][: self.ranks], mine) for record in self._records)
        return next((other for other, is_same in enumerate(views) if not is_same), -1)

    def _come(self, field: str, number: int) -> None:
        """Wait until all ranks have `field` at `number`."""

        def missing() -> int:
            behind = (i for i, record in enumerate(self._records) if record[field] < number)
            return next(behind, -1)

        for waited in self._wait(missing):
            other = missing()
            if other >= 0:
                self._check_life(other, waited)

    def _check_life(self, other: int, waited: float) -> None:
        health = self._board.health(other)
        if health.pid and not exists(health.pid):
            raise GroupError(f"rank {self.rank} waited for rank {other}, whose process has ended")
        if waited > self.seconds and health.age > self.seconds:
            raise GroupError(
                f"rank {self.rank} has waited {waited:.0f} s for rank {other}, which has shown no "
                f"life for {health.age:.0f} s"
            )
        if waited > EXCHANGE_SECONDS:
            raise GroupError(
                f"rank {self.rank} has waited {waited:.0f} s for what rank {other} was to tell; "
                "it lives: perhaps it takes steps in another order"
            )

    def _wait(self, missing: Callable[[], int]) -> Iterator[float]:
        """The seconds so far, again and again while a rank is missing."""
        began = time.monotonic()
        while (other := missing()) >= 0:
            self._board.wait_for(self.rank, other)
            self._board.beat(self.rank)
            if self._board.aborted is not None:
                raise GroupError(
                    f"the group was ended while rank {self.rank} waited for rank {other}: "
                    f"{self._board.aborted}"
                )
            yield time.monotonic() - began
            time.sleep(PAUSE_SECONDS)
        self._board.wait_for(self.rank, -1)

    def _read(self, other: int) -> bytes:
        """What a rank has written. Its check tells when a part of it comes late."""
        record, data = self._records[other], b""

        def torn() -> int:
            nonlocal data
            data = record["data"][: int(record["length"])].tobytes()
            return -1 if zlib.crc32(data) == int(record["check"]) else other

        for waited in self._wait(torn):
            self._check_life(other, waited)
        return data


def meet(
    plan_id: str,
    board: Board,
    rank: int,
    seconds: float = 60.0,
    start_seconds: float = START_SECONDS,
    islands: Sequence[int] = (),
) -> BoardGroup:
    """The group of all ranks of the Board, once they have come. Before weights are loaded.

    seconds: for which a rank may let others wait. islands: as in Group. Raises GroupError."""
    group = BoardGroup(plan_id, board, rank, seconds)
    group.islands = islands
    group.meet(start_seconds)
    log.info("rank %d has met %d ranks as %s", rank, group.ranks, group.name)
    return group
