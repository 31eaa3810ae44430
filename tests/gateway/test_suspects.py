from voltapile.gateway.request import Request, State
from voltapile.gateway.suspects import Suspects
from voltapile.workers.protocol import Sampling


def make(id: int, known: int = 4, ahead: int = 1) -> Request:
    request = Request(id, list(range(known)), Sampling())
    request.computed, request.ahead = known, ahead
    return request


def test_all_who_were_there_are_suspects_until_they_are_past_it() -> None:
    suspects, one, two = Suspects(), make(1), make(2)
    assert not suspects
    assert suspects.accuse([two, None, one, two]) == []
    assert suspects.first is one
    assert (one.crashes, two.crashes, one.crashed_at) == (1, 1, 4)
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
    suspects.accuse([one, two])
    assert suspects.accuse([one]) == [one]


def test_who_has_ended_is_no_suspect() -> None:
    suspects, gone = Suspects(), make(1)
    gone.state = State.FINISHED
    assert suspects.accuse([gone]) == []
    assert not suspects
