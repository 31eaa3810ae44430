"""Which Results wait for the next ones, how long, and as what they arrive."""

from voltapile.workers.outbox import Outbox
from voltapile.workers.protocol import Result, Sampled


def told(interval, rounds, seconds=0.004):
    """(milliseconds, tokens) of each message, of rounds that take `seconds` each."""
    now = 100.0
    box, messages = Outbox(lambda: now), []
    for i in range(rounds):
        now = 100.0 + (i + 1) * seconds
        result = Result(id=7, rows=[Sampled(slot=1, tokens=[i])], seconds=seconds)
        result.left = rounds - 1 - i
        if (due := box.put(result, interval)) is not None:
            assert due.rounds == len(due.rows[0].tokens)
            messages.append((round((now - 100) * 1000), due.rows[0].tokens))
    return messages


def test_the_first_goes_at_once_and_the_next_wait_for_each_other():
    assert told(0.018, 12) == [
        (4, [0]),
        (20, [1, 2, 3, 4]),
        (36, [5, 6, 7, 8]),
        (44, [9, 10]),  # one round is left: the gateway sends the next Step
        (48, [11]),
    ]


def test_none_waits_for_a_round_that_comes_too_late():
    singles = [[0], [1], [2], [3]]
    assert [tokens for _, tokens in told(0.016, 4, seconds=0.009)] == singles
    assert [tokens for _, tokens in told(0.0, 4)] == singles


def test_what_ends_rounds_takes_all_along():
    """A row that ends and a Hold both leave no round."""
    box = Outbox(lambda: 1.0)
    assert box.put(Result(id=1, left=9), 0.016)
    two = [Sampled(slot=0, tokens=[5]), Sampled(slot=3, tokens=[6], logprobs=[[(6, -0.5)]])]
    assert box.put(Result(id=2, rows=two, left=8, seconds=0.25), 0.5) is None
    more = [Sampled(slot=0, tokens=[7]), Sampled(slot=3, tokens=[8], logprobs=[[(8, -1.0)]])]
    more[1].finish = "stop"
    last = box.put(Result(id=2, rows=more, left=0, seconds=0.5), 0.5)
    assert last == Result(
        id=2,
        rows=[
            Sampled(slot=0, tokens=[5, 7]),
            Sampled(slot=3, tokens=[6, 8], logprobs=[[(6, -0.5)], [(8, -1.0)]], finish="stop"),
        ],
        seconds=0.75,
        rounds=2,
    )
