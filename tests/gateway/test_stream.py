"""A stream keeps what nobody has taken yet, in order."""

import asyncio

import pytest
from voltapile.gateway.request import Chunk, Request
from voltapile.gateway.stream import Stream
from voltapile.workers.protocol import Sampling


def make_stream(cancelled: list[Request] | None = None) -> Stream:
    heard: list[Request] = [] if cancelled is None else cancelled
    return Stream(Request(1, [5], Sampling()), heard.append)


async def test_chunks_that_wait_are_merged() -> None:
    stream = make_stream()
    stream.put(Chunk([1], logprobs=[[(1, -0.5)]]))
    stream.put(Chunk([2, 3], logprobs=[[(2, -0.5)], [(3, -0.5)]]))
    assert await anext(stream) == Chunk([1, 2, 3], logprobs=[[(i, -0.5)] for i in (1, 2, 3)])
    stream.put(Chunk([4]))
    stream.put(Chunk(finish="error", error="out of luck"))
    assert await anext(stream) == Chunk([4], "error", "out of luck")
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_reader_waits_for_the_next_chunk() -> None:
    stream = make_stream()
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.put(Chunk([1]))
    assert (await waiting).tokens == [1]


async def test_a_reader_that_is_interrupted_loses_nothing() -> None:
    stream = make_stream()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)
    stream.put(Chunk([1], "length"))
    assert [chunk async for chunk in stream] == [Chunk([1], "length")]


def test_cancel_names_the_request() -> None:
    heard: list[Request] = []
    stream = make_stream(heard)
    stream.cancel()
    assert heard == [stream.request]


async def test_a_listener_is_told_at_once() -> None:
    stream, taken = make_stream(), []
    stream.put(Chunk([1]))
    stream.listen(lambda: taken.append(stream.take()))
    stream.put(Chunk([2]))
    assert taken == [Chunk([1]), Chunk([2])]
    assert stream.take() is None
