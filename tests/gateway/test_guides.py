import asyncio
import threading

import numpy as np
import pytest
from voltapile.gateway.grammar import GrammarError
from voltapile.gateway.guides import Guides
from voltapile.gateway.request import Chunk, Request, State
from voltapile.workers.protocol import Sampling


class Panic(BaseException):
    """As extensions in Rust raise it."""


class Follower:
    """A Guide that allows the token behind the last one; after 9 nothing, after 8 it breaks."""

    def __init__(self):
        self.mask = np.zeros(1, np.uint32)

    def advance(self, tokens):
        if tokens[-1] == 9:
            raise GrammarError("nothing fits it")
        if tokens[-1] == 8:
            raise Panic("out of bounds")
        return np.array([2 << tokens[-1]], np.uint32)


@pytest.fixture
async def told():
    """(guides, what they told)."""
    news = []
    changed = asyncio.Event()

    def tell(*what):
        news.append(what)
        changed.set()

    guides = Guides(tell, tell)
    yield guides, news, changed
    guides.close()


def request(guide=None):
    made = Request(1, [1], Sampling())
    made.bind(guide, None)
    made.mask = None
    return made


async def test_a_mask_comes_and_the_engine_goes_on(told):
    guides, news, changed = told
    bound, free = request(Follower()), request()
    guides.follow([(bound, Chunk([3])), (free, Chunk([4]))])
    await asyncio.wait_for(changed.wait(), 5)
    assert bound.mask.tolist() == [2 << 3]
    assert free.mask is None
    assert news == [()]


async def test_what_cannot_be_followed_ends_its_request_only(told):
    guides, news, changed = told
    bound = request(Follower())
    guides.follow([(bound, Chunk([9]))])
    await asyncio.wait_for(changed.wait(), 5)
    assert news == [(bound, "the grammar cannot be followed: nothing fits it")]


async def test_what_breaks_leaves_others_their_masks(told):
    guides, news, _ = told
    broken, bound = request(Follower()), request(Follower())
    guides.follow([(broken, Chunk([8])), (bound, Chunk([3]))])
    async with asyncio.timeout(5):
        while len(news) < 2:
            await asyncio.sleep(0.01)
    assert news == [(broken, "the grammar cannot be followed: out of bounds"), ()]
    assert bound.mask.tolist() == [2 << 3]


async def test_nothing_is_told_of_what_has_ended(told):
    guides, news, _ = told
    ended, last, empty = request(Follower()), request(Follower()), request(Follower())
    ended.state = State.FINISHED
    guides.follow([(ended, Chunk([3])), (last, Chunk([3], "stop")), (empty, Chunk())])
    await asyncio.sleep(0.05)
    assert news == []


async def test_its_thread_ends_with_it(told):
    guides, _, changed = told
    others = threading.enumerate()
    guides.follow([(request(Follower()), Chunk([3]))])
    await asyncio.wait_for(changed.wait(), 5)
    [thread] = [each for each in threading.enumerate() if each not in others]
    guides.close()
    await asyncio.to_thread(thread.join, 5)
    assert not thread.is_alive()
