from voltapile.gateway.request import Request, State
from voltapile.gateway.suspects import FAULT, KILL, Suspects
from voltapile.workers.protocol import Sampling


def make(id: int, known: int = 4, ahead: int = 1) -> Request:
    request = Request(id, list(range(known)), Sampling())
    request.computed, request.ahead = known, ahead
    return request


def test_all_who_were_there_are_suspects_until_they_are_past_it() -> None:
    suspects, one, two = Suspects(), make(1), make(2)
    assert not suspects
    assert suspects.accuse([two, None, one, two], FAULT) == []
    assert suspects.first is one
    assert (one.crashes, two.crashes, one.crashed_at) == (3, 3, 4)
    suspects.has_tokens(one)
    assert one in suspects
    one.known.append(9)
    suspects.has_tokens(one)
    assert one not in suspects
    assert one.crashes == 0
    suspects.remove(two)
    assert not suspects


def test_who_was_there_alone_twice_must_have_done_it() -> None:
    suspects, one, two = Suspects(), make(1), make(2)
    suspects.accuse([one, two], FAULT)
    assert suspects.accuse([one], FAULT) == [one]


def test_who_has_ended_is_no_suspect() -> None:
    suspects, gone = Suspects(), make(1)
    gone.state = State.FINISHED
    assert suspects.accuse([gone], FAULT) == []
    assert not suspects


def test_what_somebody_else_may_have_done_counts_less() -> None:
    suspects, one = Suspects(), make(1)
    assert [suspects.accuse([one], KILL) for _ in range(5)] == [[]] * 5
    assert suspects.accuse([one], KILL) == [one]
