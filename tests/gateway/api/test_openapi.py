"""The document and the server say the same: routes by comparison, bodies by schemathesis (slow)."""

import asyncio
import sys

import numpy as np
import pytest
from voltapile.gateway.api.app import make_app
from voltapile.gateway.api.openapi import document
from voltapile.gateway.request import Chunk

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)


def test_every_route_is_there(engine, tokenizer, template, plan):
    app = make_app(engine, tokenizer, template, plan)
    served = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.method != "HEAD"
    }
    told = {(m, path) for path, item in document()["paths"].items() for m in item}
    assert told == served


async def test_it_is_served_without_a_key(serve):
    client = await serve(api_keys=["secret"])
    async with client.get("/openapi.json") as response:
        assert response.status == 200
        body = await response.json()
    assert body == document()
    chat = body["components"]["schemas"]["ChatBody"]
    assert chat["required"] == ["messages"]
    assert chat["properties"]["n"]["anyOf"][0]["maximum"] == 16


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_bodies(serve, engine, tmp_path):
    """What the records forbid is refused, what they allow is no server error, whatever it is."""
    client = await serve()
    hidden = np.ones(4, np.float32)
    engine.script = [Chunk([72], hidden=hidden), Chunk([257], finish="stop")]
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run"),
        *(f"{client._base_url}/openapi.json", "--checks", ",".join(CHECKS)),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", "25", "--seed", "1"),
        *("--suppress-health-check", "all", "--generation-database", "none", "--no-color"),
    ]
    program = await asyncio.create_subprocess_exec(
        *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await program.communicate()
    assert program.returncode == 0, said.decode()
