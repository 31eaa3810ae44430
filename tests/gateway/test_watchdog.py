"""Silence and stopped processes, with a clock that the test sets."""

from __future__ import annotations

from voltapile.gateway.watchdog import LOADING_SECONDS, Watchdog


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


def watchdog(ranks: Ranks) -> Watchdog:
    return Watchdog(ranks, ranks, 4.0)  # type: ignore[arg-type]


def test_silence_of_a_rank_that_has_loaded() -> None:
    ranks = Ranks()
    dog = watchdog(ranks)
    ranks.silence = 3.9
    assert dog.complaint(100.0, 0.0, True) == ""
    ranks.silence = 4.2
    assert dog.complaint(100.0, 0.0, True) == (
        "no sign of life for 4.2 s from the worker of rank 2"
    )
    assert dog.complaint(100.0, 98.0, True) == "", "it was another's"
    ranks.who = "the worker of rank 1"
    assert "from the worker of rank 1, which somebody has stopped" in dog.complaint(
        100.0, 0.0, True
    )


def test_loading_may_take_longer() -> None:
    ranks = Ranks()
    dog = watchdog(ranks)
    ranks.silence = LOADING_SECONDS
    assert dog.complaint(100.0, 0.0, False) == ""
    ranks.silence = LOADING_SECONDS + 1
    assert "for 61 s while loading" in dog.complaint(100.0, 0.0, False)
    ranks.pids = []
    assert dog.complaint(100.0, 0.0, False) == "", "they have ended, and the next ones begin soon"
    ranks.pids = [1]
    other = Watchdog(ranks, None, 4.0)
    assert other.complaint(100.0, 0.0, False) == "", "whoever starts them decides"


def test_a_stopped_process() -> None:
    ranks = Ranks()
    dog = watchdog(ranks)
    assert dog.complaint(10.0, 0.0, False) == ""
    ranks.who = "the worker of rank 1"
    assert dog.complaint(11.0, 0.0, False) == ""
    assert dog.complaint(14.5, 0.0, False) == "the worker of rank 1 has been stopped for 4.5 s"
    ranks.who = ""
    assert dog.complaint(14.6, 0.0, False) == ""


def test_nobody_can_tell() -> None:
    ranks = Ranks()
    ranks.silence = None
    dog = watchdog(ranks)
    assert dog.complaint(1e6, 0.0, True) == ""
    assert not dog.can_tell
    assert Watchdog(None, None, 4.0).complaint(1e6, 0.0, True) == ""
