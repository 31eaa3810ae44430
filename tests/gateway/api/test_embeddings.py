import base64

import numpy as np
import openai
import pytest
from voltapile.gateway.api.embeddings import unit
from voltapile.gateway.request import Chunk
from voltapile.workers.protocol import Want

HIDDEN = np.array([3.0, 0.0, -4.0], np.float32)


@pytest.fixture(autouse=True)
def _script(engine):
    engine.script = [Chunk([97], finish="length", hidden=HIDDEN)]


async def test_vectors(post, engine):
    status, body = await post("/v1/embeddings", {"input": ["a", "bcd"], "model": "any"})
    assert status == 200
    assert [each["index"] for each in body["data"]] == [0, 1]
    assert body["data"][1]["object"] == "embedding"
    assert body["data"][1]["embedding"] == pytest.approx([0.6, 0.0, -0.8])
    assert body["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    assert (body["object"], body["model"]) == ("list", "tiny/model")
    assert engine.prompts == [[97], [98, 99, 100]]
    assert engine.wants == [Want(hidden=True)] * 2
    assert engine.sampling[1].max_position == 4


@pytest.mark.parametrize("value", ["ab", ["ab"], [97, 98], [[97, 98]]])
async def test_forms_of_an_input(post, engine, value):
    status, _ = await post("/embeddings", {"input": value})
    assert status == 200
    assert engine.prompts == [[97, 98]]


async def test_base64(post):
    _, body = await post("/v1/embeddings", {"input": "a", "encoding_format": "base64"})
    data = base64.b64decode(body["data"][0]["embedding"])
    np.testing.assert_allclose(np.frombuffer(data, "<f4"), [0.6, 0.0, -0.8])


async def test_openais_client(serve):
    session = await serve()
    url = str(session._base_url / "v1")
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as api:
        answer = await api.embeddings.create(model="any", input=["a", "b"])
    assert answer.data[0].embedding == pytest.approx([0.6, 0.0, -0.8])


async def test_a_worker_that_sends_none_or_fails(post, engine):
    engine.script = [Chunk([97], finish="length")]
    assert (await post("/v1/embeddings", {"input": "a"}))[0] == 500
    engine.script = [Chunk(finish="error", error="rank 0 died")]
    status, body = await post("/v1/embeddings", {"input": "a"})
    assert (status, body["error"]["message"]) == (500, "rank 0 died")
    assert all(stream.cancelled.is_set() for stream in engine.streams)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [[1], [999]]}, "input[1][0]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "x" * 300}, "input"),
        ({"input": "a", "dimensions": 256}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "model": 5}, "model"),
    ],
)
async def test_bad_bodies(post, fields, param):
    status, body = await post("/v1/embeddings", fields)
    assert (status, body["error"]["param"]) == (400, param), body


def test_a_vector_of_zeros_stays_one():
    assert unit(np.zeros(3, np.float32)).tolist() == [0.0, 0.0, 0.0]


async def test_as_llama_server(post, engine):
    status, body = await post("/embedding", {"content": ["a", "bc"], "embd_normalize": 2})
    assert status == 200
    assert [each["index"] for each in body] == [0, 1]
    [vector] = body[1]["embedding"]
    assert vector == pytest.approx([0.6, 0.0, -0.8])
    assert engine.prompts == [[97], [98, 99]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "content"),
        ({"content": 5}, "content"),
        ({"input": []}, "input"),
        ({"input": "a", "content": "a"}, "input"),
        ({"content": "a", "embd_normalize": -1}, "embd_normalize"),
    ],
)
async def test_bad_bodies_as_llama_server(post, body, param):
    status, answer = await post("/embedding", body)
    assert (status, answer["error"]["param"]) == (400, param)
