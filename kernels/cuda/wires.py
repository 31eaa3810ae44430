"""Opens the ways between this GPU and those of the other ranks, and proves each before its use.

A rank's memory is opened in the others' processes by IPC; where that cannot be done, or a pattern
does not arrive as it was written, the pair goes by way of pinned host memory, on the reader's node.
Everything is opened here, once: while kernels wait for a peer nothing may be.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from voltapile.kernels.cuda import proof, stream
from voltapile.kernels.cuda.device import Memory, Pinned
from voltapile.kernels.cuda.links import ROOM, Islands, Links, Way, Words, islands_of, record_of
from voltapile.kernels.group import Group, GroupError
from voltapile.shm.segment import Segment, SegmentError

log = logging.getLogger(__name__)

REPORT_BYTES = 64
_LETTER = struct.Struct("<QQii64s")  # process, address, GPU, its multiprocessors, handle
BLOCKS_EACH = 2  # of the largest kernels, on a multiprocessor


@dataclass
class Wires:
    """What is open so far. to: where this rank writes for each other one, or None."""

    ops: proof.Prover
    group: Group
    inbox: Memory  # a room for each rank; that of this one holds the record
    to: list[int | None] = field(default_factory=list)
    into: list[int] = field(default_factory=list)  # where it reads what each wrote
    is_linked: list[bool] = field(default_factory=list)  # by more than PCIe
    by_host: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool))
    blocks: int = 1  # that every rank's GPU runs at once
    are_apart: bool = True  # a process each; ranks of one process may share a GPU
    mailbox: Segment | None = None  # of this rank
    owners: list[object] = field(default_factory=list)

    def others(self) -> list[int]:
        return [rank for rank in range(self.group.ranks) if rank != self.group.rank]

    def lock(self, address: int, nbytes: int, owner: object) -> int:
        """Page-lock host memory as long as the links live; where the GPU sees it. owner: keeps it
        mapped."""
        locked = Locked(self.ops.device, address, nbytes, owner)
        self.owners.append(locked)
        return locked.address


class Locked:
    """Page-locked host memory, mapped by `owner` until it is let go of. address: for the GPU."""

    def __init__(self, device: Any, start: int, nbytes: int, owner: object) -> None:
        self.address = int(device.register(start, nbytes))
        # At the end of the process the driver does it.
        weakref.finalize(self, _let_go, device, start, owner).atexit = False


def _let_go(device: Any, start: int, owner: object) -> None:
    """owner: kept until here."""
    with contextlib.suppress(device.failure):  # as after any error that stays
        device.unregister(start)


def open_links(ops: proof.Prover, group: Group) -> Links:
    """All ranks call this at once. Raises GroupError, SegmentError."""
    inbox = ops.device.allocate(group.ranks * ROOM, "communication")
    ops.device.clear(inbox.ptr, inbox.nbytes)
    ops.device.synchronize()
    wires = Wires(ops, group, inbox)
    _open_peers(wires)
    is_direct = _prove_peers(wires)
    islands = islands_of(is_direct)
    _go_by_host(wires, is_direct)
    _clear(wires)
    for node, speed in proof.nodes(ops, group).items():
        log.info("rank %d reads host memory of node %d: %.1f GB/s", group.rank, node, speed)
    links = _record(wires, islands)
    _choose(wires, links)
    return links


def _choose(wires: Wires, links: Links) -> None:
    """Which ways sums go: those with norms where they are measured to be faster. Both ways let the
    kernels behind them start before they wait themselves (csrc/grid.cuh), so that a long chain is
    on the GPU at once: ranks that share it must all find room there, and it has places for 128
    kernels; and a product that waits for other ranks' has multiprocessors meanwhile. So such ranks
    keep to what holds few."""
    if wires.are_apart:
        links.norms = proof.norm_pays(wires.ops, links, wires.group)
    links.tails = all(each[0] for each in wires.group.exchange(bytes([_has_tails(wires)])))
    told = ("yes" if each else "no" for each in (links.norms, links.tails))
    log.info("rank %d: sums take norms along: %s; products make sums: %s", links.rank, *told)


def _has_tails(wires: Wires) -> bool:
    """Whether this rank's products may make sums. Not measured: what that saves is the start of the
    product behind, and one alone was measured to be slower where models are faster."""
    near = (wires.is_linked[each] and not wires.by_host[wires.group.rank, each]
            for each in wires.others())  # fmt: skip
    return wires.are_apart and wires.ops.arch >= stream.ARCH and all(near)


def _open_peers(wires: Wires) -> None:
    """Exchange handles of the inboxes, and open those of one's own island."""
    device, group = wires.ops.device, wires.group
    size, handle = wires.ops.multiprocessors, device.handle_of(wires.inbox)
    letter = _LETTER.pack(os.getpid(), wires.inbox.ptr, device.number, size, handle)
    letters = [_LETTER.unpack(each) for each in group.exchange(letter)]
    wires.blocks = BLOCKS_EACH * min(each[3] for each in letters)
    wires.are_apart = len({each[0] for each in letters}) == len(letters)
    for rank, (process, address, number, _, handle) in enumerate(letters):
        start: int | None = None
        if process == os.getpid():
            start = address
        elif _island(group, rank) == _island(group, group.rank):
            try:
                start = device.open_handle(handle)
            except device.failure as error:
                log.info("rank %d cannot open rank %d's memory: %s", group.rank, rank, error)
        wires.to.append(None if start is None else start + group.rank * ROOM)
        wires.into.append(wires.inbox.ptr + rank * ROOM)
        wires.is_linked.append(device.is_linked(number))


def _island(group: Group, rank: int) -> int:
    return group.islands[rank] if group.islands else 0


def _prove_peers(wires: Wires) -> np.ndarray:
    """[ranks, ranks]: whether what one writes straight to the other arrives, both ways."""
    group = wires.group
    arrived = proof.patterns(wires.ops, group, wires.to, wires.into)
    for source, target in group.faults:
        arrived[source, target] = 0.0
    could = np.array([list(bits) for bits in group.exchange(_bits(wires.to))], bool)
    for other in wires.others():
        speed = arrived[group.rank, other]
        if speed:
            kind = "a link" if wires.is_linked[other] else "PCIe"
            log.info("rank %d to %d over %s: %.0f GB/s, proven", group.rank, other, kind, speed)
        elif could[group.rank, other]:
            log.warning(
                "what rank %d writes to rank %d's GPU does not arrive: the two go by host memory",
                group.rank,
                other,
            )
    good = arrived > 0
    return np.asarray(good & good.T, bool)


def _bits(to: Sequence[int | None]) -> bytes:
    return bytes(each is not None for each in to)


def _go_by_host(wires: Wires, is_direct: np.ndarray) -> None:
    """Mailboxes in host memory for the pairs that need them; each reader makes its own."""
    group = wires.group
    wires.by_host = ~is_direct & ~np.eye(group.ranks, dtype=bool)
    if not wires.by_host.any():
        return
    boxes = _mailboxes(wires)
    for other in wires.others():
        if wires.by_host[group.rank, other]:
            place = _place_in(wires.by_host, other, group.rank)
            wires.to[other] = boxes[other] + place * ROOM
            wires.into[other] = (
                boxes[group.rank] + _place_in(wires.by_host, group.rank, other) * ROOM
            )
    to = [each if wires.by_host[group.rank, i] else None for i, each in enumerate(wires.to)]
    arrived = proof.patterns(wires.ops, group, to, wires.into)
    for other in wires.others():
        if wires.by_host[group.rank, other]:
            speed = arrived[group.rank, other]
            log.info("rank %d to %d by host memory: %.1f GB/s", group.rank, other, speed)
    lost = np.argwhere(wires.by_host & (arrived == 0))
    if len(lost):
        source, target = lost[0].tolist()
        raise GroupError(
            f"what rank {source} writes to rank {target} does not arrive, by host memory neither"
        )


def _place_in(by_host: np.ndarray, reader: int, writer: int) -> int:
    """Which room of the reader's mailboxes is the writer's."""
    return int(by_host[:writer, reader].sum())


def _mailboxes(wires: Wires) -> dict[int, int]:
    """Addresses of the mailboxes that this rank reads or writes, by reader."""
    group, by_host = wires.group, wires.by_host
    segments, reason = {}, ""
    mine = int(by_host[:, group.rank].sum()) * ROOM
    try:
        if mine:  # first touched, and so placed, by this rank
            segments[group.rank] = Segment.create(group.name, f"mail-{group.rank}", mine)
    except SegmentError as error:
        reason = str(error)
    reasons = [each.decode("utf-8", "replace") for each in group.exchange(reason.encode()[:1000])]
    if any(reasons):
        raise SegmentError(next(filter(None, reasons)))
    for other in wires.others():
        if by_host[group.rank, other]:
            nbytes = int(by_host[:, other].sum()) * ROOM
            segments[other] = Segment.open(group.name, f"mail-{other}", nbytes)
    group.exchange(b"")
    for segment in segments.values():
        segment.unlink()
    wires.mailbox = segments.get(group.rank)
    return {rank: wires.lock(each.address, each.nbytes, each) for rank, each in segments.items()}


def _clear(wires: Wires) -> None:
    """Proofs have left patterns where flags must be 0."""
    device, group = wires.ops.device, wires.group
    for other in wires.others():
        if not wires.by_host[group.rank, other]:
            device.clear(wires.into[other], ROOM)
    device.synchronize()
    if wires.mailbox is not None:
        wires.mailbox.array(np.uint8, (wires.mailbox.nbytes,))[:] = 0
    group.exchange(b"")


def _record(wires: Wires, islands: Islands) -> Links:
    device, group = wires.ops.device, wires.group
    report = Pinned(REPORT_BYTES)
    report.bytes[:] = 0
    words = Words(
        _host_word(wires, group.abort_address),
        _host_word(wires, group.waits_for_address),
        report.ptr,
    )
    ways = []
    for other, (out, into) in enumerate(zip(wires.to, wires.into, strict=True)):
        assert out is not None
        is_narrow = bool(wires.by_host[group.rank, other]) or not wires.is_linked[other]
        ways.append(Way(out, into, is_narrow))
    limit = round(group.seconds * device.ticks_per_second)
    values = record_of(group.rank, ways, islands, limit, words)
    place = wires.into[group.rank]
    pinned = Pinned(values.nbytes)
    pinned.bytes[:] = values
    device.send(place, pinned.ptr, values.nbytes)
    device.synchronize()
    group.exchange(b"")  # nobody writes before all are ready to be written to
    log.info("rank %d: islands %s", group.rank, list(islands.ranks))
    owners = [wires.inbox, report, *wires.owners]
    counted = report.bytes.view(np.uint32)
    return Links(
        place,
        group.rank,
        group.ranks,
        islands,
        counted,
        group.seconds,
        wires.blocks,
        owners,
    )


def _host_word(wires: Wires, address: int) -> int:
    """Where kernels see a word of the Board, which the group has mapped."""
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    return wires.lock(page, mmap.PAGESIZE, wires.group) + address - page
