"""POST /tokenize and /detokenize, with llama-server's bodies."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from voltapile.gateway.api.errors import bad_request, json_response
from voltapile.gateway.api.fields import Fields
from voltapile.gateway.api.schema import token_ids
from voltapile.gateway.api.services import SERVICES, off_loop
from voltapile.gateway.tokenizer import Tokenizer


async def tokenize(request: web.Request) -> web.Response:
    """{"content", "add_special": false, "parse_special": true, "with_pieces": false}"""
    tokenizer = request.app[SERVICES].tokenizer
    fields = Fields.parse(await request.read())
    text = fields.text("content")
    if text is None:
        raise bad_request("'content' is missing", "content", "missing_required_parameter")
    ids = await off_loop(
        len(text),
        tokenizer.encode,
        text,
        add_special=fields.flag("add_special"),
        parse_special=fields.flag("parse_special", default=True),
    )
    if not fields.flag("with_pieces"):
        return json_response({"tokens": ids})
    return json_response({"tokens": [{"id": i, "piece": _piece(tokenizer, i)} for i in ids]})


async def detokenize(request: web.Request) -> web.Response:
    """{"tokens": [ids]}; control tokens show their names."""
    tokenizer = request.app[SERVICES].tokenizer
    fields = Fields.parse(await request.read())
    ids = token_ids(fields.list("tokens"), "tokens", tokenizer.vocab_size)
    return json_response({"content": tokenizer.decode(ids, special=True)})


def _piece(tokenizer: Tokenizer, token: int) -> Any:
    """A string, or a list of bytes where the token is only a part of a character."""
    piece = tokenizer.token_bytes(token)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
