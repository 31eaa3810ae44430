"""Checkpoints: states of hybrid models that are kept in the workers' memory, by number.

A layer with a state instead of a cache cannot go back, so a prefix is only reused up to where its
states were kept. They are kept at whole blocks alone: chunks of prompts are cut there anyway, so
nothing changes a bit, and no page is shared that is not full. Integers only: the workers copy.
"""

from __future__ import annotations

from voltapile.gateway.pages import PagePool
from voltapile.gateway.prefix import PrefixCache
from voltapile.gateway.request import Request
from voltapile.topology.plan import Plan
from voltapile.workers.protocol import Copy

LAST_WORDS = 16  # tokens at a prompt's end that the next turn may have otherwise, or not at all
STRIDE = 4  # blocks between two states of an answer that is being generated


def numbers(plan: Plan) -> PagePool | None:
    """Which checkpoints are free. Number 0 is nobody's, as page 0 is. None: there are no states."""
    return PagePool(plan.checkpoints + 1, 1) if plan.has_states and plan.checkpoints else None


class Checkpoints:
    """Where requests keep their states, and the copies that the next Steps make.

    What a Step leaves in a slot is copied by the next one, before its rows run: nobody else can
    have had the slot between them.
    """

    def __init__(self, plan: Plan, prefixes: PrefixCache) -> None:
        self.prefixes, self.pool, self.block = prefixes, prefixes.checkpoints, prefixes.block
        blocks = -(-max(1, plan.checkpoint_tokens) // self.block)
        self.every = blocks * self.block
        self._due: list[Copy] = []  # of states that Steps sent before leave
        self._after: list[Copy] = []  # of states that the Step that is being made leaves
        self._restores: list[Copy] = []

    def begin(self, request: Request, computed: int) -> None:
        """It gets a slot, and goes on from the states at `computed`."""
        request.marks = self._marks(request, computed)
        if self.pool is not None and computed:
            request.restored = self.prefixes.checkpoint(request.keys[computed // self.block - 1])
            self.pool.share([request.restored])

    def enter(self, request: Request) -> None:
        """Its first row is in the Step that is being made."""
        if request.restored and self.pool is not None:
            copy = Copy(kind="restore", source=request.restored, target=request.slot)
            self._restores.append(copy)
            self.pool.release([request.restored])
            request.restored = 0

    def passed(self, request: Request) -> None:
        """The Step that is being made computes up to request.computed."""
        at = request.computed
        is_mark = at in request.marks
        if not request.is_prefilling and at >= len(request.prompt):
            is_mark |= at % (STRIDE * self.block) == 0
        if self.pool is None or not is_mark or not self.pool.free:
            return
        [number] = self.pool.alloc(1)
        request.saved.append((at, number))
        self._after.append(Copy(kind="checkpoint", source=request.slot, target=number))

    def remember(self, request: Request, valid: int) -> None:
        """Blocks of the first `valid` positions are known: their states can be found from now on.

        Of states of an answer the last ones are enough."""
        while request.saved and request.saved[0][0] <= valid:
            at, number = request.saved.pop(0)
            key = request.keys[at // self.block - 1]
            self.prefixes.attach(key, number)
            if at > len(request.prompt):
                if request.rolled:
                    self.prefixes.detach(request.rolled)
                request.rolled = key if at % self.every else b""

    def end(self, request: Request) -> None:
        """It leaves its slot."""
        if self.pool is not None:
            self.pool.release([number for _, number in request.saved])
            if request.restored:
                self.pool.release([request.restored])
        request.saved, request.restored = [], 0

    def copies(self) -> list[Copy]:
        """Of the Step that has been made."""
        found = self._due + self._restores
        self._due, self._after, self._restores = self._after, [], []
        return found

    def clear(self) -> None:
        """The workers, and what they kept, are gone."""
        self._due, self._after, self._restores = [], [], []

    def is_underway(self, request: Request, computed: int, other: Request) -> bool:
        """`other` is going to keep states that `request` can begin from."""
        for mark in other.marks:
            block = mark // self.block - 1
            if max(computed, other.remembered * self.block) < mark < len(request.known):
                keys = request.keys[block : block + 1]
                if keys == other.keys[block : block + 1]:
                    return True
        return False

    def _marks(self, request: Request, computed: int) -> frozenset[int]:
        """Where states are kept while a request's tokens are read: at the end and before the words
        that may differ in the next turn, where others have gone another way, and now and then."""
        if self.pool is None:
            return frozenset()
        known = len(request.known)
        shared = self.prefixes.depth(request.keys) * self.block
        apart = -(-2 * known // max(1, self.pool.total) // self.block) * self.block
        found = {known - 1, known - LAST_WORDS, shared}
        found |= set(range(0, known, max(self.every, apart)))
        found = {max(0, at) // self.block * self.block for at in found}
        return frozenset(at for at in found if computed < at < known)
