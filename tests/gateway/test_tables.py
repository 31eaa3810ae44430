"""The page tables of requests: whole known texts, and windows that move along."""

from typing import cast

from voltapile.gateway.request import Request
from voltapile.gateway.tables import PageTables
from voltapile.topology.plan import CacheGroup, Plan
from voltapile.workers.protocol import Sampling


class Sketch:
    """As much of a Plan as tables look at."""

    def __init__(self, *groups: tuple[int, int, int], batch_tokens: int = 8) -> None:
        self.context, self.batch_tokens = 1000, batch_tokens
        self.has_states, self.checkpoints, self.checkpoint_tokens = False, 0, 0
        self.caches = [
            CacheGroup(
                kind="", layers=[0], kv_heads=1, key_dim=8, value_dim=8, window=window,
                key_type="f16", value_type="f16", page_tokens=tokens, page_bytes=1, pages=pages,
            )
            for pages, tokens, window in groups
        ]  # fmt: skip


def tables_of(*groups: tuple[int, int, int], batch_tokens: int = 8) -> PageTables:
    return PageTables(cast(Plan, Sketch(*groups, batch_tokens=batch_tokens)), 8)


def request(length: int, first: int = 1) -> Request:
    return Request(0, [first, *range(2, length + 1)], Sampling())


def begin(tables: PageTables, one: Request, spare: int = 0) -> bool:
    computed, shared = tables.prefix(one)
    return tables.begin(one, computed, shared, spare)


def test_blocks_hold_whole_pages_and_whole_pieces() -> None:
    assert tables_of((9, 4, 0), (9, 16, 0)).block == 16
    assert tables_of((9, 3, 0)).block == 24


def test_a_request_begins_with_pages_for_all_it_knows() -> None:
    tables = tables_of((11, 4, 0))
    one = request(30)
    assert not begin(tables, one, spare=3)
    assert tables.pools[0].free == 10
    assert begin(tables, one, spare=2)
    assert (len(one.pages[0]), one.room) == (8, 32)
    assert tables.extend(one, 30, 32) == []
    assert tables.extend(one, 32, 33) == [[one.pages[0][-1]]]
    assert tables.extend(one, 33, 45) is None
    tables.end(one)
    assert tables.pools[0].free == 10


def test_what_was_remembered_is_shared_but_for_the_last_token() -> None:
    tables = tables_of((30, 4, 0))
    one, two, other = request(32), request(32), request(32, first=9)
    assert begin(tables, one)
    tables.remember(one, 20)
    assert tables.prefix(two)[0] == 16
    tables.remember(one, 32)
    assert begin(tables, two)
    assert (two.computed, two.shared) == (24, 24)
    assert two.pages[0][:6] == one.pages[0][:6]
    assert tables.prefix(other)[0] == 0
    tables.end(one)
    tables.end(two)
    assert tables.pools[0].free == 29
    tables.forget(one)
    assert tables.prefix(two)[0] == 0


def test_idle_shared_pages_do_not_count_twice() -> None:
    tables = tables_of((9, 4, 0))
    one = request(32)
    assert begin(tables, one)
    tables.remember(one, 32)
    tables.end(one)
    other = request(32, first=7)
    assert begin(tables, other), "evicting all"
    tables.end(other)
    again = request(36)
    again.known.pop()
    assert not begin(tables, again), "nine pages"
    assert begin(tables, request(32))


def test_a_window_takes_what_it_sees() -> None:
    tables = tables_of((300, 4, 0), (9, 4, 16), batch_tokens=8)
    assert tables.can_hold(1000)
    one = request(200)
    assert begin(tables, one)
    assert [len(table) for table in one.pages] == [50, 7]
    for start in range(0, 200, 8):
        assert tables.extend(one, start, start + 8) is not None
        table = one.pages[1]
        seen = range(max(0, start - 15) // 4, (start + 8) // 4)
        assert all(table[page] for page in seen)
        assert len({table[page] for page in seen}) == len(seen)
        assert not any(table[: seen[0]])
    tables.end(one)
    assert [pool.free for pool in tables.pools] == [299, 8]


def test_a_window_that_never_fits() -> None:
    assert not tables_of((300, 4, 0), (7, 4, 16)).can_hold(100)
    assert tables_of((300, 4, 0), (7, 4, 16)).can_hold(24)
