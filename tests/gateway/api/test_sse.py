import asyncio
import contextlib
import socket

import aiohttp
import pytest
from aiohttp import web
from voltapile.gateway.api.errors import engine_error
from voltapile.gateway.api.sse import FULL, EventStream, event


@pytest.fixture
async def get():
    """await get(block, **options) -> bytes of a stream whose body is `block(events)`."""

    async def read(block, keepalive_seconds=15.0):
        async def handler(request):
            events = EventStream(request, keepalive_seconds=keepalive_seconds, write_seconds=5)
            async with events:
                await block(events)
            return events.response

        async with served(handler) as url, aiohttp.request("GET", url) as response:
            assert response.headers["Cache-Control"] == "no-cache"
            return await response.read()

    return read


@contextlib.asynccontextmanager
async def served(handler):
    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    await runner.cleanup()


async def test_bytes(get):
    async def block(events):
        await events.send({"a": "é\n"})
        events.write(event({"b": 1}) + event({"c": 2}))
        await events.done()

    expected = 'data: {"a":"é\\n"}\n\ndata: {"b":1}\n\ndata: {"c":2}\n\ndata: [DONE]\n\n'
    assert await get(block) == expected.encode()


async def test_nothing_does_not_end_a_stream(get):
    async def block(events):
        assert events.write(b"")
        await events.done()

    assert await get(block) == b"data: [DONE]\n\n"


async def test_comments_while_nothing_is_sent(get):
    async def block(events):
        await asyncio.sleep(0.2)
        await events.done()

    data = await get(block, keepalive_seconds=0.05)
    assert data.endswith(b": keep-alive\n\ndata: [DONE]\n\n")
    assert 2 <= data.count(b": keep-alive\n\n") <= 4


async def test_no_comments_between_frequent_events(get):
    async def block(events):
        for _ in range(10):
            await events.send(1)
            await asyncio.sleep(0.02)

    assert b":" not in (await get(block, keepalive_seconds=0.15)).replace(b"data:", b"")


async def test_an_error_is_an_event(get):
    async def block(events):
        await events.send(1)
        raise engine_error("rank 0 died")

    data = await get(block)
    assert data.startswith(b'data: 1\n\ndata: {"error":{"message":"rank 0 died"')
    assert data.endswith(b"}\n\ndata: [DONE]\n\n")


async def test_a_dialect_has_its_own_comments_and_errors():
    async def handler(request):
        events = EventStream(
            request,
            keepalive_seconds=0.05,
            write_seconds=5,
            comment=b"event: ping\n\n",
            failure=lambda error: f"event: error\ndata: {error.status}\n\n".encode(),
        )
        async with events:
            await asyncio.sleep(0.12)
            raise engine_error("rank 0 died")
        return events.response

    async with served(handler) as url, aiohttp.request("GET", url) as response:
        data = await response.read()
    assert data.startswith(b"event: ping\n\n")
    assert data.endswith(b"\n\nevent: error\ndata: 500\n\n")


async def test_a_client_that_does_not_read_is_dropped(caplog):
    ended = asyncio.Event()

    async def handler(request):
        events = EventStream(request, keepalive_seconds=15, write_seconds=0.1)
        try:
            async with events:
                for _ in range(1000):
                    await events.send("x" * 100_000)
        finally:
            ended.set()
        return events.response

    async with served(handler) as url:
        port = int(url.rstrip("/").rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.wait_for(ended.wait(), 5)
    assert "did not read" in caplog.text


async def test_a_client_that_does_not_read_fills_the_stream():
    seen = []

    async def handler(request):
        events = EventStream(request, keepalive_seconds=15, write_seconds=5)
        async with events:
            while events.write(event("x" * FULL)):
                pass
            seen.append("full")
            await events.drain()
            seen.append(events.write(event("y")))
        return events.response

    async with served(handler) as url, aiohttp.request("GET", url) as response:
        while not seen:
            await asyncio.sleep(0.01)
        assert b"x" * FULL in await response.read()
    assert seen == ["full", True]


async def test_http_1_0_has_no_chunks():
    async def handler(request):
        events = EventStream(request, keepalive_seconds=15, write_seconds=5)
        async with events:
            events.write(event(1))
            await events.done()
        return events.response

    async with served(handler) as url:
        port = int(url.rstrip("/").rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        data = await asyncio.wait_for(reader.read(), 5)
        writer.close()
    assert data.partition(b"\r\n\r\n")[2] == b"data: 1\n\ndata: [DONE]\n\n"
