"""What the gateway knows of its workers: who has loaded, how far the others are, their memory."""

from __future__ import annotations

from types import SimpleNamespace

from voltapile.gateway.crew import UNHEARD, Crew, Progress
from voltapile.workers.protocol import Ready, Stats


def crew(ranks: int, answer_rank: int = 0) -> Crew:
    plan = SimpleNamespace(
        ranks=[SimpleNamespace(rank=rank) for rank in range(ranks)], answer_rank=answer_rank
    )
    return Crew(plan)  # type: ignore[arg-type]


def stats(rank: int, **values: float | str) -> Stats:
    return Stats(name=f"text-{rank}", values=dict(values))


def ready(rank: int, instance: int = 1) -> Ready:
    return Ready(name=f"text-{rank}", plan="p", instance=instance)


def test_the_slowest_is_told() -> None:
    found = crew(3, 2)
    assert found.answers == "text-2"
    assert found.slowest() == (f"{UNHEARD} (rank 0 of 3)", 0.0)
    found.take(ready(0))
    found.hear(stats(1, stage="weights", fraction=0.25))
    assert found.slowest() == ("weights (rank 1 of 3)", 0.25)
    assert found.progress() == [
        Progress(0, "ready", 1.0),
        Progress(1, "weights", 0.25),
        Progress(2, UNHEARD, 0.0),
    ]
    assert not found.is_complete
    found.take(ready(1))
    found.take(ready(2))
    assert found.is_complete
    assert found.slowest() == ("ready", 1.0)


def test_alone_no_rank_is_named() -> None:
    found = crew(1)
    found.hear(stats(0, stage="weights", fraction=0.5))
    assert found.slowest() == ("weights", 0.5)


def test_a_process_is_known_by_its_instance() -> None:
    found = crew(2)
    assert found.is_empty
    found.take(ready(1, 7))
    assert found.has("text-1")
    assert found.is_known(ready(1, 7))
    assert not found.is_known(ready(1, 8))
    found.forget()
    assert found.is_empty


def test_memory_is_kept() -> None:
    found = crew(2)
    found.hear(stats(1, **{"stage": "ready", "fraction": 1.0, "planned kv": 10, "allocated kv": 9}))
    found.hear(stats(1, stage="ready", fraction=1.0))
    assert found.memory == {1: {"kv": (10, 9)}}


def test_where_workers_tell_their_own_metrics() -> None:
    found = crew(2)
    found.hear(stats(1, **{"status port": 8181.0}))
    found.hear(stats(7, **{"status port": 1.0}))
    assert found.ports == {1: 8181}
    found.forget()
    assert found.ports == {}
