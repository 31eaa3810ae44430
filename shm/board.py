"""Board: one small Segment that says who is alive, who waits for whom, and whether to give up.

    offset            size  field               writer
    0                 4     magic 0x44524256    creator
    4                 4     layout version      creator
    8                 4     number of ranks     creator
    16                4     abort flag (0: go)  anyone
    20                4     length of reason    anyone
    64                448   reason of an abort  anyone
    4096 (rank + 1)         one record for each rank, written by that rank alone:
      + 0             8     heartbeat, nanoseconds of CLOCK_MONOTONIC; 0: never
      + 8             4     process id; 0: not started
      + 12            4     state, an index into STATES
      + 16            8     id of the step in progress; -1: none
      + 24            4     rank that it waits for; -1: none
      + 32            8     fraction of the stage that is done
      + 64            4     length of stage
      + 68            188   stage, for people
      + 512           3584  56 IPC handles of 64 bytes; workers/group.py's letters

Ordering: every number is aligned, has one writer, and is read and written whole. Texts come before
the number that announces them (state, abort flag) and their lengths after; they may be seen torn,
so nothing is ever decided by a text. A reader that needs two fields of one moment needs a message.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np
from voltapile.shm.segment import Segment, SegmentError

MAGIC, VERSION = 0x44524256, 1
STATES = ("empty", "loading", "ready", "failed", "stopped")
HANDLES, HANDLE_BYTES = 56, 64
_STRIDE = 4096
_HEAD = np.dtype(
    {
        "names": ["magic", "version", "ranks", "abort", "reason_len", "reason"],
        "formats": ["<u4", "<u4", "<u4", "<u4", "<u4", "V448"],
        "offsets": [0, 4, 8, 16, 20, 64],
        "itemsize": _STRIDE,
    }
)
_RANK = np.dtype(
    {
        "names": [
            "heartbeat",
            "pid",
            "state",
            "step",
            "waits_for",
            "fraction",
            "stage_len",
            "stage",
            "handles",
        ],
        "formats": ["<u8", "<u4", "<u4", "<i8", "<i4", "<f8", "<u4", "V188", "V3584"],
        "offsets": [0, 8, 12, 16, 24, 32, 64, 68, 512],
        "itemsize": _STRIDE,
    }
)


@dataclass(frozen=True)
class Health:
    """What one rank last said of itself. age: seconds since its heartbeat."""

    pid: int
    state: str
    stage: str
    fraction: float
    step: int
    waits_for: int
    age: float


class Board:
    """`create` in the process that starts the ranks, `open` in each of them."""

    def __init__(self, segment: Segment, num_ranks: int) -> None:
        self.segment = segment
        self.num_ranks = num_ranks
        self._head = segment.array(np.uint8, (_STRIDE,)).view(_HEAD)
        self._ranks = segment.array(np.uint8, (num_ranks * _STRIDE,), _STRIDE).view(_RANK)

    @classmethod
    def create(cls, plan_id: str, num_ranks: int) -> Board:
        """Raises SegmentError."""
        board = cls(Segment.create(plan_id, "board", _STRIDE * (num_ranks + 1)), num_ranks)
        board._ranks["step"] = -1
        board._ranks["waits_for"] = -1
        board._head["ranks"], board._head["version"] = num_ranks, VERSION
        board._head["magic"] = MAGIC
        return board

    @classmethod
    def open(cls, plan_id: str, num_ranks: int) -> Board:
        """Raises SegmentError."""
        segment = Segment.open(plan_id, "board", _STRIDE * (num_ranks + 1))
        board = cls(segment, num_ranks)
        found = tuple(int(board._head[name][0]) for name in ("magic", "version", "ranks"))
        if found != (MAGIC, VERSION, num_ranks):
            raise SegmentError(
                f"{segment.path}: found (magic, version, ranks) = {found}, expected "
                f"{(MAGIC, VERSION, num_ranks)}"
            )
        return board

    # --- a rank about itself --------------------------------------------------------------

    def join(self, rank: int) -> None:
        """This process is rank `rank` from now on."""
        self._ranks["step"][rank], self._ranks["waits_for"][rank] = -1, -1
        self._ranks["fraction"][rank] = 0.0
        self._ranks["stage_len"][rank] = 0
        self._ranks["pid"][rank] = os.getpid()
        self.beat(rank)
        self._ranks["state"][rank] = STATES.index("loading")

    def beat(self, rank: int) -> None:
        """The loop of this rank is running."""
        self._ranks["heartbeat"][rank] = time.monotonic_ns()

    def publish(self, rank: int, state: str, stage: str = "", fraction: float = 0.0) -> None:
        """State and progress, and a heartbeat."""
        text = _clip(stage, _RANK["stage"].itemsize)
        self._bytes(rank, "stage")[: len(text)] = np.frombuffer(text, np.uint8)
        self._ranks["stage_len"][rank] = len(text)
        self._ranks["fraction"][rank] = fraction
        self.beat(rank)
        self._ranks["state"][rank] = STATES.index(state)

    def begin_step(self, rank: int, step: int) -> None:
        """step: its id, or -1 when none is in progress."""
        self._ranks["step"][rank] = step
        self.beat(rank)

    def wait_for(self, rank: int, other: int) -> None:
        """other: the rank whose data are missing, or -1."""
        self._ranks["waits_for"][rank] = other

    # --- about a rank ---------------------------------------------------------------------

    def health(self, rank: int) -> Health:
        record = self._ranks[rank]
        length = min(int(record["stage_len"]), _RANK["stage"].itemsize)
        state = int(record["state"])
        return Health(
            pid=int(record["pid"]),
            state=STATES[state] if state < len(STATES) else "failed",
            stage=self._bytes(rank, "stage")[:length].tobytes().decode("utf-8", "replace"),
            fraction=float(record["fraction"]),
            step=int(record["step"]),
            waits_for=int(record["waits_for"]),
            age=self.age(rank),
        )

    def age(self, rank: int) -> float:
        """Seconds since its last sign of life; infinite: it has given none."""
        beat = int(self._ranks[rank]["heartbeat"])
        return (time.monotonic_ns() - beat) / 1e9 if beat else float("inf")

    def is_alive(self, rank: int, max_age: float) -> bool:
        """Its process exists and its loop has beaten in the last `max_age` seconds."""
        health = self.health(rank)
        if not health.pid or health.age > max_age:
            return False
        return exists(health.pid)

    def heartbeat_address(self, rank: int) -> int:
        """Where code outside Python writes its heartbeat (uint64)."""
        assert 0 <= rank < self.num_ranks
        return self.segment.address + _STRIDE * (rank + 1)

    def waits_for_address(self, rank: int) -> int:
        """Where code outside Python writes whom it waits for (int32)."""
        assert 0 <= rank < self.num_ranks
        return self.heartbeat_address(rank) + int(_RANK.fields["waits_for"][1])  # type: ignore[index]

    def handles(self, rank: int) -> np.ndarray:
        """uint8[56, 64]: the rank's IPC handles."""
        return self._bytes(rank, "handles").reshape(HANDLES, HANDLE_BYTES)

    # --- the abort flag -------------------------------------------------------------------

    @property
    def abort_address(self) -> int:
        """Where every wait outside Python looks (uint32): not 0 means to give up."""
        return self.segment.address + int(_HEAD.fields["abort"][1])  # type: ignore[index]

    @property
    def aborted(self) -> str | None:
        """Why everything that waits must give up; None while it need not."""
        if not self._head["abort"][0]:
            return None
        length = min(int(self._head["reason_len"][0]), _HEAD["reason"].itemsize)
        return self._reason()[:length].tobytes().decode("utf-8", "replace")

    def abort(self, reason: str) -> None:
        text = _clip(reason, _HEAD["reason"].itemsize)
        self._reason()[: len(text)] = np.frombuffer(text, np.uint8)
        self._head["reason_len"] = len(text)
        self._head["abort"] = 1

    def clear_abort(self) -> None:
        """Before ranks start anew."""
        self._head["abort"] = 0

    def clear(self) -> None:
        """Nobody is here, and nobody need give up."""
        self._ranks["pid"], self._ranks["state"] = 0, STATES.index("empty")
        self._ranks["step"], self._ranks["waits_for"] = -1, -1
        self.clear_abort()

    def close(self) -> None:
        del self._head, self._ranks
        self.segment.close()

    def _reason(self) -> np.ndarray:
        return self.segment.array(np.uint8, (_HEAD["reason"].itemsize,), 64)

    def _bytes(self, rank: int, name: str) -> np.ndarray:
        assert 0 <= rank < self.num_ranks
        kind, offset = _RANK.fields[name][:2]  # type: ignore[index]
        return self.segment.array(np.uint8, (kind.itemsize,), _STRIDE * (rank + 1) + offset)


def exists(pid: int) -> bool:
    """Whether there is such a process, be it one that nobody has waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _clip(text: str, size: int) -> bytes:
    """At most `size` bytes of UTF-8, cut between characters."""
    return text.encode("utf-8", "replace")[:size].decode("utf-8", "ignore").encode()
