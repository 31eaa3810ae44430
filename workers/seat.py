"""Seat: one rank's place on the Board, from its coming to its end.

A group lives and dies as one: whoever ends tells the others through the Board's abort flag, and a
rank that comes waits until a group that was ended is gone. Knows neither gateway nor model.
"""

from __future__ import annotations

import contextlib
import os
import time

from voltapile.kernels.group import GroupError
from voltapile.shm.board import Board, exists
from voltapile.shm.segment import FOLDER, SegmentError
from voltapile.workers.claim import Claim

MATE_SECONDS = 60.0  # without a sign of life after which a rank is given up by the others
PREDECESSORS_SECONDS = 10.0  # that a group which was ended may take to go away
TRIES, PAUSE_SECONDS = 3, 0.05


class Seat:
    """Take it with `join`; `board` is there from then on."""

    def __init__(self, plan_id: str, ranks: int, rank: int) -> None:
        self.plan_id, self.ranks, self.rank = plan_id, ranks, rank
        self.others = [other for other in range(ranks) if other != rank]

    def join(self) -> Board:
        """Raises SegmentError, GroupError; then nothing has changed for those who are there."""
        self.board = self._open()
        # Containers may have our network, and with it our names, and Boards of their own.
        self._claim = Claim(f"{FOLDER.stat().st_dev}/{self.plan_id}/{self.rank}")
        before = self.board.health(self.rank)
        if before.pid != os.getpid() and self.board.aborted is None and self._lives(self.rank):
            raise GroupError(f"rank {self.rank} runs as pid {before.pid}: it is started twice")
        self._claim_seat(before.pid)
        if before.state in ("loading", "ready") and any(map(self._lives, self.others)):
            self.leave("was started again")  # those who were with it wait for it in vain
        self._outlive()
        self.board.join(self.rank)
        return self.board

    def leave(self, reason: str) -> str:
        """The others would wait for us in vain. Returns why the group ends: the first reason
        counts, since ours may follow from it; "" for a rank that is alone."""
        if not self.others:
            return ""
        if self.board.aborted is None:
            self.board.abort(f"rank {self.rank}: {reason}")
        return self.board.aborted or reason

    def cause(self) -> str:
        """Why the group ends, as in Failed: what has become of the others."""
        mates = [self.board.health(rank) for rank in self.others]
        if any(mate.state == "stopped" for mate in mates):
            return "stopped"
        silent = (mate.pid for mate in mates if mate.state != "failed")
        return "gone" if any(pid and not exists(pid) for pid in silent) else ""

    def check_mates(self) -> None:
        """Is everybody there whom the next Step needs? Raises GroupError."""
        self._claim.answer()
        for rank in self.others:
            if not self.board.is_alive(rank, MATE_SECONDS):
                raise GroupError(f"rank {rank} has ended or shows no sign of life")

    def _open(self) -> Board:
        """The gateway's or another rank's; our own where none is yet."""
        for _ in range(TRIES):  # two ranks may find none at the same moment
            with contextlib.suppress(SegmentError):
                return Board.open(self.plan_id, self.ranks)
            with contextlib.suppress(SegmentError):
                return Board.create(self.plan_id, self.ranks)
            time.sleep(PAUSE_SECONDS)
        return Board.create(self.plan_id, self.ranks)

    def _claim_seat(self, known: int) -> None:
        """One whose gateway has gone, and the Board with it, lives on and is on no Board. known: a
        process that is on the Board and may hang."""
        deadline = time.monotonic() + PREDECESSORS_SECONDS
        while (holder := self._claim.take()) and holder != known:
            if time.monotonic() > deadline:
                who = f"pid {holder}" if holder > 0 else "a process that is not seen from here"
                raise GroupError(
                    f"rank {self.rank} runs as {who}, whose gateway has gone: it is started twice; "
                    "end that process"
                )
            time.sleep(PAUSE_SECONDS)

    def _outlive(self) -> None:
        """Let a group that was ended before us go away; the next one may begin then."""
        deadline = time.monotonic() + PREDECESSORS_SECONDS
        while (reason := self.board.aborted) is not None:
            if not any(self._lives(rank) for rank in self.others):
                self.board.clear_abort()
            elif time.monotonic() > deadline:
                raise GroupError(
                    f"the group before this one was ended and is still there: {reason}"
                )
            time.sleep(PAUSE_SECONDS)

    def _lives(self, rank: int) -> bool:
        is_over = self.board.health(rank).state in ("failed", "stopped")
        return not is_over and self.board.is_alive(rank, PREDECESSORS_SECONDS)
