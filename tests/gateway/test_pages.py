import pytest
from hypothesis import given
from hypothesis import strategies as st
from voltapile.gateway.pages import PagePool


def test_page_0_is_never_given() -> None:
    pool = PagePool(5, 32)
    assert pool.total == pool.free == 4
    assert sorted(pool.alloc(4)) == [1, 2, 3, 4]
    assert pool.free == 0
    assert pool.alloc(0) == []


def test_count() -> None:
    pool = PagePool(5, 32)
    assert [pool.count(n) for n in (0, 1, 32, 33)] == [0, 1, 1, 2]


def test_too_many_and_freed_twice_are_our_mistakes() -> None:
    pool = PagePool(3, 32)
    with pytest.raises(AssertionError):
        pool.alloc(3)
    pages = pool.alloc(2)
    pool.release(pages)
    with pytest.raises(AssertionError):
        pool.release(pages[:1])
    with pytest.raises(AssertionError):
        pool.release([0])


def test_a_shared_page_is_free_after_its_last_user() -> None:
    pool = PagePool(3, 32)
    pages = pool.alloc(1)
    pool.share(pages)
    pool.release(pages)
    assert pool.free == 1
    pool.release(pages)
    assert pool.free == 2
    with pytest.raises(AssertionError):
        pool.share(pages)


@given(st.lists(st.integers(0, 6)))
def test_no_page_has_two_owners(sizes: list[int]) -> None:
    pool = PagePool(16, 1)
    held: list[list[int]] = []
    for size in sizes:
        while pool.free < size:
            pool.release(held.pop(0))
        held.append(pool.alloc(size))
        pages = [page for taken in held for page in taken]
        assert len(pages) == len(set(pages)) == pool.total - pool.free
        assert 0 not in pages
