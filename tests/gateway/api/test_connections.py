"""Bytes on the port that are not HTTP as it should be, or that aiohttp refuses by itself."""

from __future__ import annotations

import asyncio
import json

import pytest
from voltapile.gateway.api.app import listening, make_app

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
NOISE = {
    "junk": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "junk line": b"hello\r\n\r\n",
    "version 9": b"GET / HTTP/9\r\n\r\n",
    "long line": b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "long header": b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 9000 + b"\r\n\r\n",
    "header without colon": b"GET /health HTTP/1.1\r\nHost: x\r\nnonsense\r\n\r\n",
    "length no number": POST + b"Content-Length: many\r\n\r\n{}",
    "negative length": POST + b"Content-Length: -1\r\n\r\n{}",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "chunk size": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "late chunk size": POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n",
    "unknown coding": POST + b"Transfer-Encoding: smoke\r\n\r\n{}",
    "expectation": POST + b"Expect: miracles\r\nContent-Length: 2\r\n\r\n{}",
    "no gzip": POST + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    "brotli": POST + b"Content-Encoding: br\r\nContent-Length: 2\r\n\r\n{}",
    "not UTF-8": POST + b"Content-Length: 2\r\n\r\n\xff\xfe",
}


@pytest.fixture
async def talk(engine, tokenizer, plan):
    """await talk(bytes) -> (head, body) of the first answer."""
    async with listening(make_app(engine, tokenizer, None, plan), "127.0.0.1", 0) as url:

        async def send(data: bytes) -> tuple[bytes, bytes]:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
            writer.write(data)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            body = await asyncio.wait_for(reader.readexactly(length), 5)
            writer.close()
            await writer.wait_closed()
            return head, body

        yield send


@pytest.mark.parametrize("name", NOISE)
async def test_noise_gets_the_body_of_all_errors(talk, caplog, name):
    head, body = await talk(NOISE[name])
    status = {"expectation": 417, "brotli": 415}.get(name, 400)
    assert head.split()[1] == str(status).encode()
    assert b"\r\nserver: voltapile" in head.lower()
    assert b"\r\ncontent-type: application/json" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert not caplog.records  # scanners would fill the log


async def test_after_noise_the_server_goes_on(talk):
    await talk(NOISE["junk"])
    head, body = await talk(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert json.loads(body)["object"] == "list"


async def test_a_request_without_a_version_is_answered(talk):
    head, body = await talk(b"GET /v2/health\r\n\r\n")
    assert head.split()[1] == b"404"
    assert json.loads(body)["error"]["code"] == "not_found"
