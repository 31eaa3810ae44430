"""First come first served within a client; turns between clients."""

from voltapile.gateway.queues import Queues, Turns
from voltapile.gateway.request import Request
from voltapile.workers.protocol import Sampling


def request(id: int, client: str = "a") -> Request:
    return Request(id, [1], Sampling(), client=client)


def test_a_line_for_each_client() -> None:
    queues = Queues()
    first, second, other = request(0), request(1), request(2, "b")
    assert not queues
    for one in (first, second, other):
        queues.add(one)
    assert (len(queues), list(queues.clients)) == (3, ["a", "b"])
    assert list(queues.of("a")) == [first, second]
    assert list(queues.of("nobody")) == []
    queues.remove(other)
    assert (list(queues), list(queues.clients)) == ([first, second], ["a"])


def test_who_was_sent_back_has_its_old_place() -> None:
    queues = Queues()
    requests = [request(id) for id in range(4)]
    queues.add(requests[1])
    queues.add(requests[3])
    for id in (2, 0):
        queues.put_back(requests[id])
    assert list(queues.of("a")) == requests


def test_turns_go_round_and_who_is_new_waits_for_one_round() -> None:
    turns = Turns()
    turns.set("ab")
    order = []
    for n in range(8):
        if n == 2:
            turns.set("abc")
        client = turns.next("abc" if n >= 2 else "ab")
        order.append(client)
        turns.took(client)
    assert "".join(order) == "ababcabc"


def test_who_leaves_and_comes_back_gains_nothing() -> None:
    turns = Turns()
    served = {"old": 0, "new": 0}
    for n in range(20):
        clients = ["new", "old"] if n % 2 else ["old"]
        turns.set(clients)
        client = turns.next(clients)
        served[client] += 1
        turns.took(client)
    assert served["old"] >= 10
