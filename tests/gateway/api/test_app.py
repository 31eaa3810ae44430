import asyncio
import json

import aiohttp
import pytest
from voltapile.gateway.api.app import listening, make_app, run

CHAT = "/v1/chat/completions"
POSTS = [CHAT, "/v1/completions", "/tokenize", "/detokenize"]


def is_error(body):
    error = body["error"]
    return set(error) == {"message", "type", "param", "code"} and bool(error["message"])


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b"null", b'{"a": "\xff"}', b'{"a": NaN}', b"[" * 100_000],
    ids=range(8),
)
async def test_bad_bodies(post, path, body):
    status, answer = await post(path, body)
    assert status == 400
    assert is_error(answer)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v2/models", 404),
        ("POST", "/v1/images/generations", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/tokenize", 405),
    ],
)
async def test_unknown_paths_and_methods(client, method, path, status):
    async with client.request(method, path) as response:
        assert response.status == status
        body = await response.json()
        assert is_error(body)
        if status == 404:
            assert f"unknown path {path}: " in body["error"]["message"]
        assert ("Allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/rerank"), ("POST", "/reranking"), ("POST", "/slots/0?action=save"),
     ("GET", "/lora-adapters")],
)  # fmt: skip
async def test_what_other_servers_have_is_told_apart_from_unknown_paths(client, method, path):
    async with client.request(method, path) as response:
        assert response.status == 501
        body = await response.json()
    assert is_error(body)
    assert body["error"]["code"] == "not_supported"


async def test_the_version(client):
    async with client.get("/version") as response:
        assert await response.json() == {"version": "0.1.0"}


async def test_a_large_body_is_413(serve):
    client = await serve(max_body_bytes=1000)
    body = {"prompt": "x" * 2000}
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 413
        assert is_error(await response.json())


async def test_more_than_aiohttps_default_is_fine(post):
    status, body = await post("/tokenize", b'{"content": "%s"}' % (b"x" * (2 << 20)))
    assert status == 200
    assert len(body["tokens"]) == 2 << 20


async def test_a_damaged_compressed_body(client):
    headers = {"Content-Encoding": "gzip"}
    async with client.post("/tokenize", data=b"no gzip", headers=headers) as response:
        assert response.status == 400
        assert is_error(await response.json())


async def test_a_bug_is_a_500_that_tells_nothing(post, engine):
    engine.refusal = RuntimeError("secret")
    status, body = await post("/v1/completions", {"prompt": "hi"})
    assert status == 500
    assert is_error(body)
    assert "secret" not in str(body)


class TestKeys:
    @pytest.mark.parametrize(
        ("header", "status"),
        [
            (None, 401),
            ("Bearer", 401),
            ("Bearer wrong", 401),
            ("Basic one", 401),
            ("Bearer öne", 401),
            ("Bearer one", 200),
            ("bearer two", 200),
        ],
    )
    async def test_bearer(self, serve, header, status):
        client = await serve(api_keys=["one", "two"])
        headers = {"Authorization": header} if header else {}
        async with client.get("/v1/models", headers=headers) as response:
            assert response.status == status
            if status == 401:
                body = await response.json()
                assert is_error(body)
                assert body["error"]["code"] == "invalid_api_key"
                assert response.headers["WWW-Authenticate"] == "Bearer"

    async def test_another_scheme_is_for_a_proxy(self, serve):
        client = await serve(api_keys=["one"])
        headers = {"Authorization": "Basic eDp5", "X-Api-Key": "one"}
        async with client.get("/v1/models", headers=headers) as response:
            assert response.status == 200

    async def test_clients_are_told_apart_by_key_and_address(self, serve, engine):
        client = await serve(api_keys=["one", "two"])
        for key in ("one", "two", "one"):
            headers = {"Authorization": f"Bearer {key}"}
            async with client.post("/v1/completions", json={"prompt": "a"}, headers=headers) as r:
                assert r.status == 200
        one, two, again = engine.clients
        assert one == again != two
        assert one.startswith("127.0.0.1 ")
        assert "one" not in one

    @pytest.mark.parametrize(
        ("path", "status"), [("/health", 200), ("/metrics", 401), ("/nowhere", 401)]
    )
    async def test_only_health_is_open(self, serve, path, status):
        client = await serve(api_keys=["one"])
        async with client.get(path) as response:
            assert response.status == status


async def test_other_origins_are_allowed(serve):
    client = await serve(api_keys=["one"])
    asked = {"Access-Control-Request-Headers": "authorization, x-stainless-os"}
    async with client.options(CHAT, headers=asked) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == "*"
        assert response.headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
    async with client.get("/nowhere") as response:
        assert response.headers["Access-Control-Allow-Origin"] == "*"
    async with client.head("/health") as response:
        assert response.status == 200


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("during", ["prefill", "decode"])
async def test_a_client_that_leaves_cancels(client, engine, during, stream, n):
    engine.say("abc" if during == "decode" else "", finish="")
    body = {"prompt": "hi", "stream": stream, "n": n}
    request = asyncio.create_task(client.post("/v1/completions", json=body))
    await until(lambda: len(engine.streams) == n)
    if stream:
        response = await request
        if during == "decode":
            await response.content.readline()
        response.close()
    else:
        request.cancel()
    await until(lambda: all(stream.cancelled.is_set() for stream in engine.streams))


async def test_comments_during_a_long_prefill(serve, engine, parse):
    client = await serve(keepalive_seconds=0.05)
    engine.script.insert(0, 0.3)
    body = {"prompt": "hi", "stream": True}
    async with client.post("/v1/completions", json=body) as response:
        data = await response.read()
    assert data.startswith(b": keep-alive\n\n" * 3)
    assert parse(data)[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_stopping_tells_open_requests(engine, tokenizer, plan, stream):
    engine.say("abc", finish="")
    app = make_app(engine, tokenizer, None, plan)
    async with aiohttp.ClientSession() as session:
        async with listening(app, "127.0.0.1", 0) as url:
            body = {"prompt": "hi", "stream": stream}
            post = session.post(f"{url}/v1/completions", json=body)
            request = asyncio.create_task(asyncio.wait_for(post, 10))
            await until(lambda: engine.streams)
            await asyncio.sleep(0.05)
        response = await request
        text = await response.text()
        assert response.status == (200 if stream else 503)
        error = text.removesuffix("data: [DONE]\n\n").strip().split("data: ")[-1]
        assert is_error(json.loads(error))
    with pytest.raises(aiohttp.ClientConnectionError):
        async with aiohttp.ClientSession() as session, session.get(url):
            pass


async def test_run_ends_when_told(engine, tokenizer, plan):
    stop = asyncio.Event()
    app = make_app(engine, tokenizer, None, plan)
    running = asyncio.create_task(run(app, "127.0.0.1", 0, stop))
    await asyncio.sleep(0.05)
    assert not running.done()
    stop.set()
    await asyncio.wait_for(running, 5)


async def test_a_port_in_use_is_an_oserror(engine, tokenizer, plan):
    async with listening(make_app(engine, tokenizer, None, plan), "127.0.0.1", 0) as url:
        port = int(url.rsplit(":", 1)[1])
        second = make_app(engine, tokenizer, None, plan)
        with pytest.raises(OSError, match=f"127.0.0.1:{port} is in use; --port takes another"):
            async with listening(second, "127.0.0.1", port):
                pass


async def test_an_address_that_is_not_ours_is_named(engine, tokenizer, plan):
    app = make_app(engine, tokenizer, None, plan)
    with pytest.raises(OSError, match=r"cannot listen at 192\.0\.2\.1:0: "):  # of documents
        async with listening(app, "192.0.2.1", 0):
            pass


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X-Api-Key": "secret"}, 200),
        ({"X-Api-Key": "wrong"}, 401),
        ({"Authorization": "Basic secret"}, 401),
        ({"Authorization": "Bearer wrong", "X-Api-Key": "secret"}, 401),
    ],
)
async def test_anthropics_header_for_the_key(serve, headers, status):
    client = await serve(api_keys=["secret"])
    async with client.get("/v1/models", headers=headers) as response:
        assert response.status == status
