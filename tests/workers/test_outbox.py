"""Which Results wait for the next ones, how long, and as what they arrive."""

import math

import numpy as np
import pytest
from voltapile.workers.outbox import Outbox
from voltapile.workers.protocol import Result, Row, Sampled, Step

PROMPT = np.arange(3, dtype=np.int32)


class Rounds:
    """Rounds of a clock of their own, and the (milliseconds, tokens) of each message."""

    def __init__(self) -> None:
        self.now = 100.0
        self.box = Outbox(lambda: self.now)
        self.messages: list[tuple[int, list[int]]] = []

    def run(
        self, interval: float, rounds: int, seconds: float = 0.004, prompt: float = 0.0
    ) -> None:
        """seconds: of each. prompt: of the first, if that computes one."""
        for i in range(rounds):
            taken = prompt if prompt and not i else seconds
            self.now += taken
            row = Row(slot=1, tokens=PROMPT) if prompt and not i else Row(slot=1)
            result = Result(id=7, rows=[Sampled(slot=1, tokens=[i])], seconds=taken)
            result.left = rounds - 1 - i
            for due in self.box.put(result, Step(id=7, rows=[row], interval=interval)):
                assert due.rounds == len(due.rows[0].tokens)
                self.messages.append((round((self.now - 100) * 1000), due.rows[0].tokens))


def told(interval: float, rounds: int, seconds: float = 0.004) -> list[tuple[int, list[int]]]:
    found = Rounds()
    found.run(interval, rounds, seconds)
    return found.messages


def test_the_first_goes_at_once_and_the_next_wait_for_each_other() -> None:
    assert told(0.018, 12) == [
        (4, [0]),
        (20, [1, 2, 3, 4]),
        (36, [5, 6, 7, 8]),
        (44, [9, 10]),  # one round is left: the gateway sends the next Step
        (48, [11]),
    ]


def test_none_waits_for_a_round_that_comes_too_late() -> None:
    singles = [[0], [1], [2], [3]]
    assert [tokens for _, tokens in told(0.016, 4, seconds=0.009)] == singles
    assert [tokens for _, tokens in told(0.0, 4)] == singles


@pytest.mark.parametrize("interval", [0.05, 1e6, math.inf])
def test_what_answers_a_prompt_goes_at_once(interval: float) -> None:
    """However little time has gone since the last message: somebody waits for it."""
    found = Rounds()
    found.run(0.05, 2)
    found.run(interval, 6, prompt=0.01)
    assert found.messages == [(4, [0]), (8, [1]), (18, [0]), (34, [1, 2, 3, 4]), (38, [5])]


def test_what_ends_rounds_takes_all_along() -> None:
    """A row that ends and a Hold both leave no round."""
    box, step = Outbox(lambda: 1.0), Step(id=2, interval=0.5)
    assert box.put(Result(id=1, left=9), Step(id=1))
    two = [Sampled(slot=0, tokens=[5]), Sampled(slot=3, tokens=[6], logprobs=[[(6, -0.5)]])]
    assert box.put(Result(id=2, rows=two, left=8, seconds=0.25), step) == []
    more = [Sampled(slot=0, tokens=[7]), Sampled(slot=3, tokens=[8], logprobs=[[(8, -1.0)]])]
    more[1].finish = "stop"
    last = box.put(Result(id=2, rows=more, left=0, seconds=0.5), step)
    assert last == [
        Result(
            id=2,
            rows=[
                Sampled(slot=0, tokens=[5, 7]),
                Sampled(slot=3, tokens=[6, 8], logprobs=[[(6, -0.5)], [(8, -1.0)]], finish="stop"),
            ],
            seconds=0.75,
            rounds=2,
        )
    ]


def test_an_error_does_not_take_the_tokens_before_it_away() -> None:
    box, step = Outbox(lambda: 1.0), Step(id=1, interval=0.5)
    box.put(Result(id=1, rows=[Sampled(slot=0, tokens=[4])], left=4), step)
    good = Result(id=1, rows=[Sampled(slot=0, tokens=[5])], left=3)
    assert box.put(good, step) == []
    broken = Sampled(slot=0, finish="error", error="rank 0: non-finite logits")
    assert box.put(Result(id=1, rows=[broken]), step) == [good, Result(id=1, rows=[broken])]
