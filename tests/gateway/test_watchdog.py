"""Silence and stopped processes, with a clock that the test sets."""

from __future__ import annotations

import pytest
from voltapile.gateway.watchdog import LOADING_SECONDS, STOPPED_SECONDS, Watchdog


class Ranks:
    """Vitals and supervisor at once."""

    def __init__(self) -> None:
        self.silence: float | None = 0.0
        self.who = ""
        self.pids = [1]

    def age(self) -> float | None:
        return self.silence

    def quietest(self) -> str:
        return "the worker of rank 2"

    def stopped(self) -> str:
        return self.who

    def begin(self) -> None: ...

    def abort(self, reason: str) -> None: ...


TICK = 0.25


class Looks:
    """A watchdog that looks every 250 ms."""

    def __init__(self, ranks: Ranks, has_supervisor: bool = True) -> None:
        self.dog = Watchdog(ranks, ranks if has_supervisor else None, 4.0)  # type: ignore[arg-type]
        self.now, self.loaded_at = 0.0, 0.0

    def until(self, now: float, is_loaded: bool = True) -> str:
        """The first complaint, if one comes up to then."""
        said = ""
        while self.now < now and not said:
            self.now += TICK
            said = self.dog.complaint(self.now, self.loaded_at, is_loaded)
        return said


def test_silence_of_a_rank_that_has_loaded() -> None:
    ranks = Ranks()
    looks = Looks(ranks)
    ranks.silence = 3.9
    assert looks.until(100.0) == ""
    ranks.silence = 4.2
    assert looks.until(101.0) == "no sign of life for 4.2 s from the worker of rank 2"
    looks.loaded_at = 98.0
    assert looks.until(102.0) == "", "it was another's"


def test_loading_may_take_longer() -> None:
    ranks = Ranks()
    looks = Looks(ranks)
    ranks.silence = LOADING_SECONDS
    assert looks.until(100.0, False) == ""
    ranks.silence = LOADING_SECONDS + 1
    assert "for 61 s while loading" in looks.until(101.0, False)
    ranks.pids = []
    assert looks.until(102.0, False) == "", "they have ended, and the next ones begin soon"
    ranks.pids = [1]
    other = Looks(ranks, has_supervisor=False)
    assert other.until(100.0, False) == "", "whoever starts them decides"


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_stopped_process(is_loaded: bool) -> None:
    """The kernel says so: that needs no silence."""
    ranks = Ranks()
    looks = Looks(ranks)
    assert looks.until(10.0, is_loaded) == ""
    ranks.who = "the worker of rank 1"
    assert looks.until(10.0 + STOPPED_SECONDS, is_loaded) == ""
    ranks.who = ""  # somebody has looked at it
    assert looks.until(12.0, is_loaded) == ""
    ranks.who = "the worker of rank 1"
    said = "the worker of rank 1 has been stopped (SIGSTOP) for 1.2 s"
    assert looks.until(13.25, is_loaded) == said
    assert looks.until(14.25, is_loaded) == "", "it is being ended"


def test_we_were_kept_from_looking() -> None:
    """Whatever stopped us, a container's freezer or a virtual machine's, has stopped the ranks."""
    ranks = Ranks()
    looks = Looks(ranks)
    assert looks.until(10.0) == ""
    ranks.silence, ranks.who = 30.0, "the worker of rank 1"
    looks.now = 40.0
    assert looks.until(40.25) == ""
    ranks.who = ""
    assert looks.until(44.25) == ""
    assert looks.until(44.5) == "no sign of life for 4.2 s from the worker of rank 2"


def test_nobody_can_tell() -> None:
    ranks = Ranks()
    ranks.silence = None
    looks = Looks(ranks)
    assert looks.until(1e3) == ""
    assert not looks.dog.can_tell
    assert Watchdog(None, None, 4.0).complaint(1e6, 0.0, True) == ""
