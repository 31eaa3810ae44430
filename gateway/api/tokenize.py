"""POST /tokenize and /detokenize, with llama-server's bodies."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from voltapile.gateway.api.errors import bad_request, json_response
from voltapile.gateway.api.fields import Fields
from voltapile.gateway.api.schema import token_ids
from voltapile.gateway.api.services import SERVICES, off_loop, read_body
from voltapile.gateway.tokenizer import Tokenizer

MAX_CONTENT = 4 << 20  # characters; each may be a token, and one takes 150 bytes while it is found


async def tokenize(request: web.Request) -> web.Response:
    """{"content", "add_special": false, "parse_special": true, "with_pieces": false}"""
    body = await read_body(request)
    tokens = await off_loop(len(body), _tokens, request.app[SERVICES].tokenizer, body)
    return json_response({"tokens": tokens})


async def detokenize(request: web.Request) -> web.Response:
    """{"tokens": [ids]}; control tokens show their names."""
    body = await read_body(request)
    content = await off_loop(len(body), _content, request.app[SERVICES].tokenizer, body)
    return json_response({"content": content})


def _tokens(tokenizer: Tokenizer, body: bytes) -> list[Any]:
    fields = Fields.parse(body)
    text = fields.text("content")
    if text is None:
        raise bad_request("'content' is missing", "content", "missing_required_parameter")
    if len(text) > MAX_CONTENT:
        message = f"'content' has {len(text)} characters; at most {MAX_CONTENT} at once"
        raise bad_request(message, "content", "out_of_range")
    with_pieces = fields.flag("with_pieces")
    ids = tokenizer.encode(
        text,
        add_special=fields.flag("add_special"),
        parse_special=fields.flag("parse_special", default=True),
    )
    return [{"id": i, "piece": _piece(tokenizer, i)} for i in ids] if with_pieces else ids


def _content(tokenizer: Tokenizer, body: bytes) -> str:
    ids = token_ids(Fields.parse(body).list("tokens"), "tokens", tokenizer.vocab_size)
    return tokenizer.decode(ids, special=True)


def _piece(tokenizer: Tokenizer, token: int) -> Any:
    """A string, or a list of bytes where the token is only a part of a character."""
    piece = tokenizer.token_bytes(token)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
