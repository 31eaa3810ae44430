"""Rounds: Steps of several become Steps of one; a Hold, or a row that ends, makes them fewer."""

import pytest
from voltapile.workers.protocol import Copy, Result, Row, Sampled, Step
from voltapile.workers.rounds import Rounds


def step(id: int, rounds: int) -> Step:
    row = Row(slot=3, start=5, pages=[[7]])
    copy = Copy(kind="page", source=1, target=2)
    return Step(id=id, rounds=rounds, rows=[row], release=[4], copy=[copy])


def result(id: int, finish: str = "", tokens: tuple[int, ...] = (1,)) -> Result:
    return Result(id=id, rows=[Sampled(slot=3, tokens=list(tokens), finish=finish)])


def all_of(rounds: Rounds) -> list[int]:
    """Ids of the rounds that are left, each answered at once; their last one says so."""
    found = []
    while rounds:
        found.append(rounds.next().id)
        answer = result(found[-1])
        rounds.settle(answer)
    assert answer.left == 0
    return found


def test_later_rounds_only_continue() -> None:
    rounds = Rounds()
    rounds.add(step(1, 3))
    rounds.add(step(2, 1))
    assert not rounds.is_amid
    assert rounds.next() == step(1, 3)
    for left in (1, 0):
        assert rounds.is_amid
        later = rounds.next()
        assert (later.id, later.release, later.copy) == (1, [], [])
        assert later.rows == [Row(slot=3)]
        answer = result(1)
        rounds.settle(answer)
        assert answer.left == left + 1
    assert not rounds.is_amid
    assert rounds.next() == step(2, 1)
    assert not rounds


def test_a_hold_of_a_step_that_has_not_begun() -> None:
    rounds = Rounds()
    rounds.add(step(1, 3))
    rounds.add(step(2, 3))
    rounds.hold(2)
    assert all_of(rounds) == [1, 1, 1, 2]


@pytest.mark.parametrize("begun", [1, 2])
def test_a_hold_while_rounds_are_computed(begun: int) -> None:
    rounds = Rounds()
    rounds.add(step(1, 9))
    for _ in range(begun):
        rounds.next()
    rounds.hold(1)
    assert not rounds
    answers = [result(1) for _ in range(begun)]
    for answer in answers:
        rounds.settle(answer)
    assert [answer.left for answer in answers] == [*range(begun)][::-1]


def test_a_hold_between_rounds_lets_one_more_tell() -> None:
    rounds = Rounds()
    rounds.add(step(1, 9))
    rounds.next()
    answer = result(1)
    rounds.settle(answer)
    assert answer.left == 8
    rounds.hold(7)
    rounds.hold(1)
    assert all_of(rounds) == [1]


@pytest.mark.parametrize("last", [result(1, "stop"), result(1, "error", ()), result(1, "", ())])
def test_a_row_that_ends(last: Result) -> None:
    rounds = Rounds()
    rounds.add(step(1, 9))
    rounds.next()
    rounds.next()
    rounds.settle(last)
    assert last.left == 1, "it has begun"
    assert not rounds


def test_cut() -> None:
    rounds = Rounds()
    rounds.add(step(1, 9))
    rounds.add(step(2, 9))
    rounds.next()
    rounds.cut()
    assert rounds.next().id == 2
    assert not rounds
