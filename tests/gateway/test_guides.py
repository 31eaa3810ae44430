import asyncio
import math
import threading

import numpy as np
import pytest
from voltapile.gateway.grammar import SEEN_MASKS, GrammarError, Pace
from voltapile.gateway.guides import Guides
from voltapile.gateway.request import Chunk, Request, State
from voltapile.workers.protocol import Sampling


class Panic(BaseException):
    """As extensions in Rust raise it."""


class Follower:
    """A Guide that allows the token behind the last one; after 9 nothing, after 8 and 10
    it breaks."""

    seconds = math.inf

    def __init__(self):
        self.threads = []
        self.pace = Pace()
        for _ in range(SEEN_MASKS):
            self.pace.note(1e-5)
        self.mask = np.zeros(1, np.uint32)

    def advance(self, tokens):
        self.threads.append(threading.current_thread().name)
        if tokens[-1] == 9:
            raise GrammarError("nothing fits it")
        if tokens[-1] == 8:
            raise Panic("out of bounds")
        if tokens[-1] == 10:
            raise ValueError("no such token")
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
    assert news == [(bound, "nothing fits it", "refused")]


@pytest.mark.parametrize(("token", "why"), [(8, "out of bounds"), (10, "no such token")])
async def test_what_breaks_leaves_others_their_masks(told, token, why):
    guides, news, _ = told
    broken, bound = request(Follower()), request(Follower())
    guides.follow([(broken, Chunk([token])), (bound, Chunk([3]))])
    async with asyncio.timeout(5):
        while len(news) < 2:
            await asyncio.sleep(0.01)
    assert news == [(broken, f"the grammar cannot be followed: {why}", "error"), ()]
    assert bound.mask.tolist() == [2 << 3]


async def test_nothing_is_told_of_what_has_ended(told):
    guides, news, _ = told
    ended, last, empty = request(Follower()), request(Follower()), request(Follower())
    ended.state = State.FINISHED
    guides.follow([(ended, Chunk([3])), (last, Chunk([3], "stop")), (empty, Chunk())])
    await asyncio.sleep(0.05)
    assert news == []


async def test_its_threads_end_with_it(told):
    guides, _, changed = told
    others = threading.enumerate()
    guides.follow([(request(Follower()), Chunk([3]))])
    await asyncio.wait_for(changed.wait(), 5)
    threads = [each for each in threading.enumerate() if each not in others]
    guides.close()
    for thread in threads:
        await asyncio.to_thread(thread.join, 5)
    assert len(threads) == 2
    assert not any(thread.is_alive() for thread in threads)


async def test_a_quick_mask_is_there_at_once(told):
    guides, news, changed = told
    bound = request(Follower())
    guides.follow([(bound, Chunk([3]))])
    assert bound.mask is None, "nobody knows yet what it takes"
    await asyncio.wait_for(changed.wait(), 5)
    bound.guide.seconds = 1e-4
    guides.follow([(bound, Chunk([4]))])
    assert bound.mask.tolist() == [2 << 4]
    assert news == [()], "nobody waits, so nobody is told"
    assert bound.guide.threads == ["grammar", "MainThread"]
    assert bound.guide.seconds != 1e-4, "it is measured each time"


async def test_many_quick_masks_are_not_quick(told):
    guides, _, _ = told
    all_bound = [request(Follower()) for _ in range(4)]
    for each in all_bound:
        each.guide.seconds = 1.1e-4
    guides.follow([(each, Chunk([3])) for each in all_bound])
    async with asyncio.timeout(5):
        while any(each.mask is None for each in all_bound):
            await asyncio.sleep(0.01)
    names = [each.guide.threads for each in all_bound]
    assert names == [["MainThread"]] * 2 + [["grammar"]] * 2


@pytest.mark.parametrize("token", [8, 9])
async def test_a_quick_one_that_breaks_is_told_after_its_token(told, token):
    guides, news, changed = told
    bound = request(Follower())
    bound.guide.seconds = 0.0
    guides.follow([(bound, Chunk([token]))])
    assert news == []
    await asyncio.wait_for(changed.wait(), 5)
    assert news[0][0] is bound


class Slow(Follower):
    """Its masks take until `is_free`."""

    def __init__(self, is_free, seconds=5e-3):
        super().__init__()
        self.is_free = is_free
        self.pace.note(seconds)
        self.seconds = 1e-5  # the last one was quick

    def advance(self, tokens):
        assert self.is_free.wait(5)
        return super().advance(tokens)


async def test_a_grammar_with_slow_masks_holds_up_nobody(told):
    """Not the event loop though its last mask was quick, nor the masks of others in a thread."""
    guides, _, _ = told
    is_free = threading.Event()
    slow, unknown, quick = request(Slow(is_free)), request(Follower()), request(Follower())
    quick.guide.seconds = 1e-4
    guides.follow([(each, Chunk([3])) for each in (slow, unknown, quick)])
    assert quick.guide.threads == ["MainThread"], "a slow one before it takes none of its time"
    async with asyncio.timeout(5):
        while unknown.mask is None:
            await asyncio.sleep(0.01)
    assert slow.mask is None
    is_free.set()
    async with asyncio.timeout(5):
        while slow.mask is None:
            await asyncio.sleep(0.01)
    assert slow.guide.threads == ["slow grammar"]
    assert unknown.guide.threads == ["grammar"]


async def test_a_grammar_that_is_new_may_be_slow(told):
    """As many masks as are seen first are not computed on the loop, however quick they are."""
    guides, _, _ = told
    bound = request(Follower())
    bound.guide.pace = Pace()
    for place in range(SEEN_MASKS + 1):
        bound.guide.seconds, bound.mask = 1e-5, None
        guides.follow([(bound, Chunk([place % 8]))])
        async with asyncio.timeout(5):
            while bound.mask is None:
                await asyncio.sleep(0.001)
    assert bound.guide.threads == ["slow grammar"] * SEEN_MASKS + ["MainThread"]


def test_a_slow_mask_is_remembered_for_a_while():
    pace = Pace()
    assert pace.worst == math.inf
    for seconds in [1e-4] * SEEN_MASKS + [5e-3]:
        pace.note(seconds)
    assert pace.worst == 5e-3
    for _ in range(80):
        pace.note(1e-4)
    assert pace.worst > 2e-3
    for _ in range(20):
        pace.note(1e-4)
    assert 1e-4 < pace.worst < 2e-3
