"""PrefixCache: which pages hold the beginning of a text, so that it is not computed again.

A text is cut into blocks of equally many tokens. A block's key is a hash of its tokens and of the
key before it, so one key stands for all that came before, and a salt for what tokens do not tell.
Blocks know the pages of each cache group; a group with a window may have lost its pages of a block,
which then only serves texts whose end is far enough behind it. Where layers have states, a text can
only be reused up to a block at whose end they were kept (a checkpoint). It knows neither requests
nor steps.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from voltapile.gateway.pages import PagePool

KEY_BYTES = 16


def extend_keys(keys: list[bytes], tokens: Sequence[int], block: int, salt: bytes) -> None:
    """Append to `keys` those of all further whole blocks of `tokens`."""
    for start in range(len(keys) * block, len(tokens) - block + 1, block):
        before = keys[-1] if keys else salt
        ids = array("i", tokens[start : start + block]).tobytes()
        keys.append(hashlib.blake2b(ids, digest_size=KEY_BYTES, key=before).digest())


@dataclass(eq=False)
class Block:
    key: bytes
    before: Block | None
    pages: list[list[int]]  # for each group; [] where they are lost
    checkpoint: int = 0  # of the states behind it; 0: there is none
    after: dict[bytes, Block] = field(default_factory=dict)


class PrefixCache:
    """block: tokens in one; a multiple of every pool's page_tokens. checkpoints: numbers of states
    that are kept, handed out as pages are; None where layers have no states."""

    def __init__(
        self, pools: Sequence[PagePool], block: int, checkpoints: PagePool | None = None
    ) -> None:
        assert all(block % pool.page_tokens == 0 for pool in pools)
        self.pools, self.block, self.checkpoints = pools, block, checkpoints
        self._kept: dict[int, Block] = {}  # checkpoint -> its block
        if checkpoints is not None:
            checkpoints.on_evict = self._forgotten
        self._windowed = [group for group, pool in enumerate(pools) if pool.window]
        self._blocks: dict[bytes, Block] = {}
        self._homes: list[dict[int, Block]] = [{} for _ in pools]  # page -> who keeps it
        for group, pool in enumerate(pools):
            pool.on_evict = partial(self._lost, group)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def longest(self, keys: Sequence[bytes]) -> tuple[int, list[list[int]]]:
        """The most of `keys`' blocks that can be reused, and their pages in each group, which the
        caller has to share. Pages that no later token sees are 0."""
        chain: list[Block] = []
        best, unbroken = 0, [0] * len(self.pools)  # from which block on a group has all pages
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            chain.append(block)
            for group in self._windowed:
                if not block.pages[group]:
                    unbroken[group] = len(chain)
            if self.checkpoints is not None and not block.checkpoint:
                continue
            if all(self._serves(group, unbroken[group], len(chain)) for group in self._windowed):
                best = len(chain)
        return best, [self._table(group, chain[:best]) for group in range(len(self.pools))]

    def depth(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`' blocks are here, whether they can be reused or not."""
        return next((n for n, key in enumerate(keys) if key not in self._blocks), len(keys))

    def checkpoint(self, key: bytes) -> int:
        """Of the states behind a block; 0: there is none."""
        block = self._blocks.get(key)
        return block.checkpoint if block else 0

    def attach(self, key: bytes, number: int) -> None:
        """The states behind a block are in this checkpoint, which the caller gives up: it is kept
        with the block, or free if that is not here or has one."""
        assert self.checkpoints is not None
        block = self._blocks.get(key)
        if block is not None and not block.checkpoint:
            self.checkpoints.keep(number)
            block.checkpoint, self._kept[number] = number, block
        self.checkpoints.release([number])

    def detach(self, key: bytes) -> None:
        """The states behind a block are of little use now."""
        if block := self._blocks.get(key):
            self._lose_checkpoint(block)

    def insert(self, before: bytes | None, key: bytes, pages: list[list[int]]) -> None:
        """Keep a block whose pages were computed and are in use. A group without them has []."""
        block = self._blocks.get(key)
        if block is None:
            parent = self._blocks.get(before) if before else None
            has_lost = any(not own for own, pool in zip(pages, self.pools, strict=True)
                           if not pool.window)  # fmt: skip
            if (before and parent is None) or has_lost or not any(pages):
                return  # nothing leads to it any more
            block = self._blocks[key] = Block(key, parent, [[] for _ in self.pools])
            if parent is not None:
                parent.after[key] = block
        for group, own in enumerate(pages):
            if own and not block.pages[group]:
                block.pages[group] = own
                for page in own:
                    self.pools[group].keep(page)
                    self._homes[group][page] = block

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget these blocks and all that follow them."""
        for key in keys:
            if (block := self._blocks.get(key)) is not None:
                self._drop(block)

    def clear(self) -> None:
        self.drop(list(self._blocks))

    def _serves(self, group: int, first: int, count: int) -> bool:
        """Pages of blocks `first` to `count` are all that a token behind them sees."""
        pool = self.pools[group]
        return first * self.block <= pool.hidden(count * self.block) * pool.page_tokens

    def _table(self, group: int, chain: list[Block]) -> list[int]:
        pool = self.pools[group]
        hidden, table = pool.hidden(len(chain) * self.block), []
        for block in chain:
            table += block.pages[group] or [0] * (self.block // pool.page_tokens)
        table[:hidden] = [0] * hidden
        return table

    def _lost(self, group: int, page: int) -> None:
        """The pool has given a kept page to somebody else."""
        block = self._homes[group].pop(page)
        block.pages[group].remove(page)
        self._strip(block, group)
        if not self.pools[group].window or not any(block.pages):
            self._drop(block)

    def _forgotten(self, number: int) -> None:
        """Another state is kept there now."""
        self._kept.pop(number).checkpoint = 0

    def _lose_checkpoint(self, block: Block) -> None:
        if block.checkpoint and self.checkpoints is not None:
            del self._kept[block.checkpoint]
            self.checkpoints.forget(block.checkpoint)
            block.checkpoint = 0

    def _strip(self, block: Block, group: int) -> None:
        pages, block.pages[group] = block.pages[group], []
        for page in pages:
            del self._homes[group][page]
            self.pools[group].forget(page)

    def _drop(self, block: Block) -> None:
        if block.before is not None:
            block.before.after.pop(block.key, None)
        doomed = [block]
        while doomed:
            block = doomed.pop()
            del self._blocks[block.key]
            for group in range(len(self.pools)):
                self._strip(block, group)
            self._lose_checkpoint(block)
            doomed += block.after.values()
            block.after = {}
