"""Whose prompt tokens a Step computes, without pages or slots."""

from voltapile.gateway.budget import Budget
from voltapile.gateway.costs import Load
from voltapile.gateway.request import Request
from voltapile.workers.protocol import Sampling


def request(id: int, length: int, client: str = "a", computed: int = 0) -> Request:
    made = Request(id, [1] * length, Sampling(), client=client)
    made.computed = computed
    return made


def nobody(client: str, tokens: int) -> None:
    return None


def test_one_prompt_gets_all_whole_pieces() -> None:
    budget, one = Budget(300, 64, 1.0), request(0, 1000, computed=10)
    assert budget.share_out([one], [], 0, nobody) == {one: 256}


def test_a_tail_fits_where_a_piece_does_not() -> None:
    budget = Budget(100, 64, 1.0)
    long, short = request(0, 1000), request(1, 30)
    assert budget.share_out([long, short], [], 0, nobody) == {long: 64, short: 30}


def test_the_prompts_end_is_an_end_though_tokens_follow() -> None:
    one = request(0, 70)
    one.known += [5] * 100
    assert Budget(512, 64, 1.0).share_out([one], [], 0, nobody) == {one: 70}
    one.computed = 70
    assert Budget(512, 64, 1.0).share_out([one], [], 0, nobody) == {one: 170}


def test_clients_take_turns_and_waiting_ones_are_asked_for() -> None:
    budget = Budget(256, 64, 1.0)
    one, other = request(0, 1000), request(1, 90, "b")
    asked: list[tuple[str, int]] = []

    def admit(client: str, tokens: int) -> Request | None:
        asked.append((client, tokens))
        return other if asked == [("b", 192)] else None

    assert budget.share_out([one], ["b", "c"], 0, admit) == {one: 128, other: 90}
    assert asked == [("b", 192), ("c", 128), ("b", 38)]


def test_nobody_is_let_in_behind_a_prompt_of_the_same_client() -> None:
    def admit(client: str, tokens: int) -> Request | None:
        raise AssertionError("asked")

    one = request(0, 1000)
    assert Budget(100, 64, 1.0).share_out([one], ["a"], 0, admit) == {one: 64}


def test_streams_limit_what_prompts_take() -> None:
    budget, one = Budget(1024, 64, 0.1), request(0, 5000)
    assert budget.share_out([one], [], 3, nobody) == {one: 64}, "nothing is known yet"
    for tokens in (64, 512):
        load = Load()
        load.add(0, tokens)
        budget.costs.observe(load, tokens * 1e-4)
    budget.costs.observe(Load(3), 0.04)
    assert budget.share_out([one], [], 3, nobody) == {one: 448}
    assert budget.share_out([one], [], 0, nobody) == {one: 1024}
