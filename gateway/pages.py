"""PagePool: which pages of one cache group are free; integers only.

Page 0 is the trash page that padding rows write to, and is never handed out. Pages carry a count of
their users, so that requests can share the pages of a common prefix.
"""

from __future__ import annotations


class PagePool:
    """pages: how many the group has, page 0 included. page_tokens: positions in one."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        assert pages >= 2, "a pool without a page to give"
        assert page_tokens >= 1
        self.page_tokens = page_tokens
        self.total = pages - 1
        self._users = [0] * pages
        self._free = list(range(pages - 1, 0, -1))  # lowest last: taken first

    @property
    def free(self) -> int:
        return len(self._free)

    def count(self, positions: int) -> int:
        """Pages that `positions` cache positions take."""
        return -(-positions // self.page_tokens)

    def alloc(self, count: int) -> list[int]:
        """`count` pages with one user each. The caller has asked `free` first."""
        assert 0 <= count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for page in taken:
            assert self._users[page] == 0
            self._users[page] = 1
        return taken

    def share(self, pages: list[int]) -> None:
        """One more user for each of `pages`."""
        for page in pages:
            assert self._users[page] > 0, f"page {page} is free"
            self._users[page] += 1

    def release(self, pages: list[int]) -> None:
        """One user less for each of `pages`; those without a user are free."""
        for page in reversed(pages):
            assert page > 0, "page 0 is nobody's"
            assert self._users[page] > 0, f"page {page} freed twice"
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)
