"""Watchdog: finds ranks that neither end nor go on.

A rank that ends is the supervisor's matter; one that hangs gives no sign of life on the Board, and
of one that was stopped (SIGSTOP) the kernel tells. It only says what is wrong: the engine decides.
Knows no messages.
"""

from __future__ import annotations

from math import inf
from typing import Protocol

from voltapile.gateway.supervisor import Supervisor

LOADING_SECONDS = 60.0  # longest silence while a worker starts and loads
STOPPED_SECONDS = 1.0  # for which somebody may stop a process, to look at it
LATE_SECONDS = 1.0  # between two looks: we were kept from running, and so were the ranks, maybe


class Vitals(Protocol):
    """What the Board tells of the ranks; see supervisor.Pulse."""

    def age(self) -> float | None:
        """Seconds since the quietest rank wrote its timestamp; None: one has not begun."""

    def quietest(self) -> str:
        """Which rank that is, for people."""

    def begin(self) -> None:
        """Nothing is left of the ranks before those that are started now."""

    def abort(self, reason: str) -> None:
        """Ranks that wait for each other give up."""


class Watchdog:
    """vitals None: nobody can tell. supervisor None: someone else starts and stops the workers.
    seconds: of silence, after which a rank that has loaded is dead."""

    def __init__(
        self, vitals: Vitals | None, supervisor: Supervisor | None, seconds: float
    ) -> None:
        self._vitals, self._supervisor, self._seconds = vitals, supervisor, seconds
        self._looked_at = self._awake_at = self._going_at = -inf  # _going_at: none was stopped then
        self.can_tell = False  # whether silence would be noticed

    def complaint(self, now: float, alive_at: float, is_loaded: bool) -> str:
        """What is wrong with a rank at time `now`; "" if nothing is. alive_at: when the workers
        were started or had loaded."""
        if now - self._looked_at > LATE_SECONDS:
            self._awake_at = self._going_at = now
        self._looked_at = now
        stopped = self._supervisor.stopped() if self._supervisor is not None else ""
        if not stopped:
            self._going_at = now
        if (seconds := now - self._going_at) > STOPPED_SECONDS:
            self._going_at = now
            return f"{stopped} has been stopped (SIGSTOP) for {seconds:.1f} s"
        age = self._vitals.age() if self._vitals is not None else None
        self.can_tell = age is not None
        if self._vitals is None or age is None:
            return ""
        silent = min(age, now - max(alive_at, self._awake_at))
        if is_loaded and silent > self._seconds:
            return f"no sign of life for {silent:.1f} s from {self._vitals.quietest()}"
        is_loading = not is_loaded and self._supervisor is not None and self._supervisor.pids
        if is_loading and silent > LOADING_SECONDS:
            return (
                f"no sign of life for {silent:.0f} s while loading from {self._vitals.quietest()}"
            )
        return ""
