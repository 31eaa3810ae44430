"""PageTables: the pages that requests hold in every cache group, and those that outlive them.

A request's table in a group is indexed by position; what no later token of it can see (behind a
window) is given back early and stands as 0. Knows nothing of steps, slots or who runs first.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm

from voltapile.gateway.checkpoints import Checkpoints, numbers
from voltapile.gateway.pages import PagePool
from voltapile.gateway.prefix import PrefixCache, extend_keys
from voltapile.gateway.request import Request
from voltapile.topology.plan import Plan

Table = list[list[int]]  # page ids of each cache group


class PageTables:
    """alignment: a prefix is reused up to a multiple of it, where prompts are cut anyway."""

    def __init__(self, plan: Plan, alignment: int) -> None:
        groups = plan.caches
        self.pools = [PagePool(g.pages, g.page_tokens, g.window) for g in groups]
        self.block = lcm(alignment, *(pool.page_tokens for pool in self.pools))
        kept = numbers(plan)
        self.can_reuse = kept is not None or not plan.has_states
        self.prefixes = PrefixCache(self.pools, self.block, kept)
        self.checkpoints = Checkpoints(plan, self.prefixes)
        self._windowed = [(i, pool) for i, pool in enumerate(self.pools) if pool.window]
        # The most pages that one request ever holds at once.
        self._spans = [
            pool.count(pool.window + plan.batch_tokens) + 1 if pool.window else plan.context
            for pool in self.pools
        ]

    def can_hold(self, positions: int) -> bool:
        """Whether one request of so many positions fits when it is alone."""
        spans = zip(self.pools, self._spans, strict=True)
        return all(min(pool.count(positions), span) <= pool.total for pool, span in spans)

    # --- a request's tenancy --------------------------------------------------------------

    def prefix(self, request: Request) -> tuple[int, Table]:
        """How many tokens of `request` need no computing, and their pages; one is always left."""
        self.keys(request)
        can_share = request.can_share and self.can_reuse
        most = (len(request.known) - 1) // self.block if can_share else 0
        blocks, pages = self.prefixes.longest(request.keys[:most])
        return blocks * self.block, pages

    def begin(self, request: Request, computed: int, shared: Table, spare: int) -> bool:
        """Give a request the pages of all that it knows, if that leaves `spare` more in each group.

        `computed` of its tokens are in the pages `shared`. Where a window moves along it gets no
        more than what it can see at once.
        """
        known, missing = len(request.known), []
        for pool, table, span in zip(self.pools, shared, self._spans, strict=True):
            count = min(pool.count(known) - len(table), span)
            if count + spare + pool.idle(table) > pool.free:
                return False
            missing.append(count)
        request.pages = []
        for pool, table in zip(self.pools, shared, strict=True):
            pool.share(filter(None, table))
        for pool, table, count in zip(self.pools, shared, missing, strict=True):
            request.pages.append(table + pool.alloc(count))
        request.hidden = [0] * len(self.pools)
        request.computed = request.shared = computed
        request.remembered = computed // self.block
        self.checkpoints.begin(request, computed)
        self._measure(request)
        return True

    def extend(self, request: Request, start: int, end: int) -> Table | None:
        """Make room for tokens from `start` to `end`, of which nothing before was sent yet.

        Returns the new pages ([]: none were needed), or None if there are not enough.
        """
        for group, pool in self._windowed:
            self._hide(group, pool, request, pool.hidden(start))
        if end <= request.room:
            return []
        missing = [
            max(0, -(-end // pool.page_tokens) - len(table))
            for pool, table in zip(self.pools, request.pages, strict=True)
        ]
        if any(count > pool.free for pool, count in zip(self.pools, missing, strict=True)):
            return None
        new = [pool.alloc(count) for pool, count in zip(self.pools, missing, strict=True)]
        for table, pages in zip(request.pages, new, strict=True):
            table += pages
        self._measure(request)
        return new

    def end(self, request: Request) -> None:
        """Give everything back; what was remembered stays until the pages are needed."""
        for pool, table in zip(self.pools, request.pages, strict=True):
            pool.release([page for page in table if page])
        request.pages = []
        request.remembered = 0
        self.checkpoints.end(request)

    # --- prefixes -------------------------------------------------------------------------

    def keys(self, request: Request) -> list[bytes]:
        extend_keys(request.keys, request.known, self.block, request.salt)
        return request.keys

    def remember(self, request: Request, valid: int) -> None:
        """The first `valid` positions are computed: later requests may share them."""
        first, last = request.remembered, valid // self.block
        if last <= first or not self.can_reuse:
            return
        request.remembered = last
        keys = self.keys(request)
        for n in range(first, last):
            pages = []
            for pool, table in zip(self.pools, request.pages, strict=True):
                size = self.block // pool.page_tokens
                own = table[n * size : (n + 1) * size]
                pages.append(own if all(own) else [])
            self.prefixes.insert(keys[n - 1] if n else None, keys[n], pages)
        self.checkpoints.remember(request, valid)

    def is_underway(self, request: Request, computed: int, running: Iterable[Request]) -> bool:
        """More of its prefix than `computed` tokens is being computed for somebody else."""
        block = computed // self.block
        if not request.can_share or (block + 1) * self.block >= len(request.known):
            return False
        others = [other for other in running if other.is_prefilling]
        if self.prefixes.checkpoints is not None:
            return any(self.checkpoints.is_underway(request, computed, each) for each in others)
        key = request.keys[block]
        return any(
            each.remembered <= block < len(each.keys) and each.keys[block] == key for each in others
        )

    def clear(self) -> None:
        """The workers, and what they had, are gone."""
        self.prefixes.clear()
        self.checkpoints.clear()

    def forget(self, request: Request) -> None:
        """What `request` has computed or used is not to be trusted."""
        self.prefixes.drop(request.keys)

    def _measure(self, request: Request) -> None:
        held = zip(self.pools, request.pages, strict=True)
        request.room = min(pool.page_tokens * len(table) for pool, table in held)

    def _hide(self, group: int, pool: PagePool, request: Request, hidden: int) -> None:
        """Give back a table's first `hidden` pages. Steps in flight still read them, but run
        before any that writes to them."""
        first = request.hidden[group]
        if hidden <= first:
            return
        table = request.pages[group]
        pool.release([page for page in table[first:hidden] if page])
        table[first:hidden] = [0] * (min(hidden, len(table)) - first)
        request.hidden[group] = hidden
