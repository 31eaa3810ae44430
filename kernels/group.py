"""Several ranks that compute one thing: how an Ops meets the others, and the collectives.

Knows neither processes nor the Plan; workers/group.py makes the Group that an Ops joins.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from voltapile.shm.segment import Segment, SegmentError

POLLS, POLL_SECONDS = 100, 2e-4  # how often a wait in Python looks: so often without a pause

Array = Any  # the backend's array type


class Group(Protocol):
    """The ranks that compute one thing together, as an Ops sees them when it joins."""

    rank: int
    ranks: int
    abort_address: int  # a uint32 in shared memory; not 0: every wait gives up
    waits_for_address: int  # an int32: the rank whose data this rank waits for, or -1
    seconds: float  # after which a wait gives up
    islands: Sequence[int]  # of each rank: only GPUs of one island write to each other; [] is one
    faults: Sequence[tuple[int, int]]  # for tests: writer and reader of ways that do not work

    @property
    def name(self) -> str:
        """For shared memory; the same on all ranks, different for every start."""

    def exchange(self, data: bytes) -> list[bytes]:
        """Each rank's data, in order of rank; waits for all. At most 2,048 bytes."""


class GroupError(RuntimeError):
    """A rank has not come, or the group was ended; says who waited for whom."""


class Collectives(Protocol):
    """What an Ops of several ranks can do; a part of Ops.

    Every rank calls these in the same order with matching shapes. They may be captured. Each wait
    ends with GroupError at its deadline or when the group is ended. Without `join` an Ops is alone:
    a group of one.
    """

    def join(self, group: Group) -> None:
        """Compute together with others from now on; before weights are taken."""

    def all_reduce(
        self, part: Array | None, shape: tuple[int, int], add_to: Array | None = None
    ) -> Array:
        """The sum over ranks of float32 part [T, D] (None: zeros), added in the order of ranks, so
        that all ranks hold the same bits and a row does not depend on its company. add_to, of that
        shape: accumulate there (+=, the residual) and return it instead of a new array."""

    def all_gather(self, part: Array | None, rows: int, widths: Sequence[int]) -> Array:
        """float32 [rows, sum(widths)]: the parts [rows, widths[rank]] side by side."""

    def broadcast_(self, x: Array, source: int) -> None:
        """x as it is on rank `source`; float32 or int32, of any size."""

    def send(self, x: Array, target: int) -> None:
        """Hand float32 x [T, D] to rank `target`, which receives it; x may change afterwards. Waits
        only while two earlier ones have not been received."""

    def receive(self, shape: tuple[int, int], source: int) -> Array:
        """What rank `source` sends next."""

    def place(self, x: Array, width: int, offset: int) -> Array:
        """[T, width]: x [T, K] from column `offset` on, zeros beside it."""


def shared_memory(
    group: Group,
    nbytes: int,
    name: str = "group",
    nodes: Sequence[int] = (),
    huge: bool = False,
) -> Segment:
    """Zeroed memory that all ranks of a group share. All must call this. nodes, huge: as a Segment
    takes them. Raises SegmentError."""
    segment, reason = None, ""
    if group.rank == 0:
        try:
            segment = Segment.create(group.name, name, nbytes, nodes=nodes, huge=huge)
        except SegmentError as error:
            reason = str(error)
    reason = group.exchange(reason.encode()[:1000])[0].decode("utf-8", "replace")
    if reason:
        raise SegmentError(reason)
    if segment is None:
        segment = Segment.open(group.name, name, nbytes)
    group.exchange(b"")
    segment.unlink()  # all have it: a crash leaves nothing behind
    return segment


def wait_until(
    group: Group, has_come: Callable[[], bool], missing: Callable[[], int], what: str
) -> None:
    """For code in Python that waits for others. missing: a rank that has not come. Raises
    GroupError."""
    began, polls = time.monotonic(), 0
    waits_for = ctypes.c_int32.from_address(group.waits_for_address)
    abort = ctypes.c_uint32.from_address(group.abort_address)
    while not has_come():
        polls += 1
        if polls < POLLS:
            time.sleep(0)
            continue
        other = waits_for.value = missing()
        seconds = time.monotonic() - began
        if abort.value:
            raise GroupError(f"the group was ended while rank {group.rank} waited for rank {other}")
        if seconds > group.seconds:
            text = f"rank {group.rank} has waited {seconds:.1f} s for rank {other}"
            raise GroupError(f"{text}, which has not {what}")
        time.sleep(POLL_SECONDS)
    waits_for.value = -1
