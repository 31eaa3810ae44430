"""Whose prompt tokens a Step computes, without pages or slots."""

from collections.abc import Callable

from voltapile.gateway.budget import Budget
from voltapile.gateway.costs import Load
from voltapile.gateway.request import Request
from voltapile.workers.protocol import Sampling

Accepts = Callable[[Request, int], bool]


def request(id: int, length: int, client: str = "a", computed: int = 0) -> Request:
    made = Request(id, [1] * length, Sampling(), client=client)
    made.computed = computed
    return made


def nobody(client: str, tokens: int, accepts: Accepts) -> None:
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
    given: list[Request] = []

    def admit(client: str, tokens: int, accepts: Accepts) -> Request | None:
        asked.append((client, tokens))
        if client != "b" or given:
            return None
        given.append(other)
        return other

    assert budget.share_out([one], ["b", "c"], 0, admit) == {one: 128, other: 90}
    assert next(ask for ask in asked if ask[0] != "a") == ("b", 192)
    assert ("c", 128) in asked


def test_a_short_prompt_gets_through_and_a_long_one_goes_on() -> None:
    budget = Budget(64, 64, 1.0)
    long, queue = request(1, 1000), [request(2, 2000), request(3, 100), request(4, 50)]

    def admit(client: str, tokens: int, accepts: Accepts) -> Request | None:
        for one in queue:
            if accepts(one, len(one.known)):
                queue.remove(one)
                return one
        return None

    running, order = [long], []
    for _ in range(8):
        [(one, end)] = budget.share_out(running, ["a"], 0, admit).items()
        order.append(one.id)
        one.computed = end
        if one not in running:
            running.append(one)
    assert order == [1, 3, 1, 3, 1, 4, 1, 1]
    assert [one.id for one in queue] == [2]


def test_the_oldest_is_let_in_though_shorter_ones_are_read() -> None:
    budget, old = Budget(64, 64, 1.0), request(0, 900)
    short = request(5, 500)

    def admit(client: str, tokens: int, accepts: Accepts) -> Request | None:
        return old if accepts(old, 900) else None

    assert budget.share_out([short], ["a"], 0, admit) == {old: 64}


def test_streams_limit_what_prompts_take() -> None:
    budget, one = Budget(1024, 64, 0.1), request(0, 5000)
    assert budget.share_out([one], [], 3, nobody) == {one: 64}, "nothing is known yet"
    for tokens in (64, 512):
        load = Load()
        load.add(0, tokens)
        budget.costs.observe(load, tokens * 1e-4)
    budget.costs.observe(Load(3), 0.04)
    assert budget.share_out([one], [], 3, nobody) == {one: 384}
    assert budget.share_out([one], [], 0, nobody) == {one: 1024}
