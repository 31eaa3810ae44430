"""PagePool: which pages of one cache group are free; integers only.

Page 0 is the trash page that padding rows write to, and is never handed out. Pages carry a count of
their users, so that requests can share the pages of a common prefix. A page that the prefix cache
keeps is free once nobody uses it, but is given last, the longest unused first. What it holds is
the cache's business: `on_evict` tells it of a page that is given to somebody else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class PagePool:
    """pages: how many the group has, page 0 included. page_tokens: positions in one.

    window: how far back a token sees, its own position included; 0: all the way.
    """

    def __init__(self, pages: int, page_tokens: int, window: int = 0) -> None:
        assert pages >= 2, "a pool without a page to give"
        assert page_tokens >= 1
        self.page_tokens, self.window = page_tokens, window
        self.total = pages - 1
        self.on_evict: Callable[[int], None] = lambda page: None
        self._users = [0] * pages
        self._free = list(range(pages - 1, 0, -1))  # lowest last: taken first
        self._is_kept = [False] * pages
        self._idle: OrderedDict[int, None] = OrderedDict()  # kept and without a user, oldest first

    @property
    def free(self) -> int:
        return len(self._free) + len(self._idle)

    def count(self, positions: int) -> int:
        """Pages that `positions` cache positions take."""
        return -(-positions // self.page_tokens)

    def hidden(self, position: int) -> int:
        """How many of a request's first pages no token at `position` or later can see."""
        return max(0, position - self.window + 1) // self.page_tokens if self.window else 0

    def alloc(self, count: int) -> list[int]:
        """`count` pages with one user each. The caller has asked `free` first."""
        assert 0 <= count <= self.free, f"{count} pages wanted, {self.free} free"
        taken = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            assert self._users[page] == 0
            self._users[page] = 1
            taken.append(page)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more user for each of `pages`, which are kept or in use."""
        for page in pages:
            assert self._users[page] > 0 or page in self._idle, f"page {page} is free"
            self._idle.pop(page, None)
            self._users[page] += 1

    def release(self, pages: list[int]) -> None:
        """One user less for each of `pages`; those without a user are free.

        Of pages let go together the last are given first, as they are of use to the fewest: who
        needs a later page of a prefix needs the earlier ones too. With a window it is the other
        way round: only a prefix's last pages are seen.
        """
        for page in pages if self.window else reversed(pages):
            assert page > 0, "page 0 is nobody's"
            assert self._users[page] > 0, f"page {page} freed twice"
            self._users[page] -= 1
            if self._users[page] == 0:
                self._set_free(page)

    def keep(self, page: int) -> None:
        """The cache wants `page`, which somebody uses, to keep what it holds after that."""
        assert self._users[page] > 0
        self._is_kept[page] = True

    def forget(self, page: int) -> None:
        """The cache does not know `page` any more."""
        assert self._is_kept[page]
        self._is_kept[page] = False
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def idle(self, pages: Iterable[int]) -> int:
        """How many of `pages` are kept without a user: free now, and not free once shared."""
        return sum(page in self._idle for page in pages)

    def _set_free(self, page: int) -> None:
        if self._is_kept[page]:
            self._idle[page] = None
        else:
            self._free.append(page)

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._is_kept[page] = False
        self.on_evict(page)
        return page
