"""Blocks are found by all that comes before them, and are lost when their pages are."""

from voltapile.gateway.pages import PagePool
from voltapile.gateway.prefix import PrefixCache, extend_keys

BLOCK = 4


def keys_of(tokens: list[int], salt: bytes = b"") -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, tokens, BLOCK, salt)
    return keys


def filled(*pools: PagePool, blocks: int = 4) -> tuple[PrefixCache, list[bytes], list[list[int]]]:
    """A cache with so many blocks of one text, whose pages are in use."""
    cache = PrefixCache(pools, BLOCK)
    keys = keys_of(list(range(blocks * BLOCK)))
    tables = [pool.alloc(blocks * BLOCK // pool.page_tokens) for pool in pools]
    for n, key in enumerate(keys):
        sizes = [BLOCK // pool.page_tokens for pool in pools]
        pages = [t[n * s : (n + 1) * s] for t, s in zip(tables, sizes, strict=True)]
        cache.insert(keys[n - 1] if n else None, key, pages)
    return cache, keys, tables


def test_a_key_stands_for_all_that_came_before() -> None:
    one, other = keys_of([1] * 12), keys_of([2] + [1] * 11)
    assert len(one) == 3
    assert not set(one) & set(other)
    assert keys_of([1] * 15) == one
    assert keys_of([1] * 8) == one[:2]
    assert not set(keys_of([1] * 12, b"salt")) & set(one)
    grown = keys_of([1] * 5)
    extend_keys(grown, [1] * 12, BLOCK, b"")
    assert grown == one


def test_the_longest_prefix() -> None:
    cache, keys, [table] = filled(PagePool(20, 2))
    assert cache.longest(keys) == (4, [table])
    assert cache.longest(keys[:2]) == (2, [table[:4]])
    assert cache.longest([*keys[:3], b"other"]) == (3, [table[:6]])
    assert cache.longest([]) == (0, [[]])


def test_a_block_without_its_predecessor_is_not_kept() -> None:
    cache, keys, _ = filled(PagePool(20, 4), blocks=2)
    cache.drop(keys[:1])
    cache.insert(keys[1], b"third", [[9]])
    assert len(cache) == 0


def test_dropping_a_block_drops_what_follows() -> None:
    pool = PagePool(20, 4)
    cache, keys, [table] = filled(pool)
    pool.release(table)
    cache.drop(keys[1:2])
    assert [key in cache for key in keys] == [True, False, False, False]
    assert pool.free == pool.total


def test_a_page_that_is_given_away_is_lost_with_its_block_and_those_behind() -> None:
    pool, other = PagePool(9, 2), PagePool(5, 4)
    cache, keys, tables = filled(pool, other)
    pool.release(tables[0])
    other.release(tables[1])
    assert pool.alloc(1) == tables[0][-1:], "the last page first"
    assert cache.longest(keys) == (3, [tables[0][:6], tables[1][:3]])
    assert other.free == 4
    pool.alloc(4)
    assert len(cache) == 1
    cache.clear()
    assert (len(cache), pool.free, other.free) == (0, 3, 4)


def test_a_window_needs_its_last_pages_only() -> None:
    full, window = PagePool(20, 4), PagePool(20, 4, window=5)
    cache, keys, tables = filled(full, window)
    assert cache.longest(keys) == (4, [tables[0], [0, 0, 0, tables[1][3]]])
    assert cache.longest(keys[:1]) == (1, [tables[0][:1], tables[1][:1]])


def test_a_block_that_lost_its_window_serves_those_far_enough_behind() -> None:
    full, window = PagePool(20, 4), PagePool(6, 4, window=8)
    cache, keys, tables = filled(full, window, blocks=5)
    window.release(tables[1])
    window.alloc(2)  # the first two are given away
    assert len(cache) == 5
    assert [cache.longest(keys[:n])[0] for n in range(6)] == [0, 0, 0, 0, 4, 5]
    assert cache.longest(keys[:4])[1][1] == [0, 0, *tables[1][2:4]]


def test_a_lost_window_is_made_whole_by_who_computes_it_again() -> None:
    full, window = PagePool(20, 4), PagePool(20, 4, window=8)
    cache, keys, tables = filled(full, window)
    mine = [full.alloc(4), window.alloc(4)]
    window.release(tables[1])
    window.alloc(15)
    assert cache.longest(keys)[0] == 0
    for n in range(2, 4):
        cache.insert(keys[n - 1], keys[n], [[mine[0][n]], [mine[1][n]]])
    assert cache.longest(keys) == (4, [tables[0], [0, 0, *mine[1][2:]]])
