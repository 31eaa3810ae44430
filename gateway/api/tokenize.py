"""POST /tokenize and /detokenize, with llama-server's bodies or vLLM's."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from voltapile.gateway.api.errors import bad_request, json_response
from voltapile.gateway.api.fields import Fields, token_ids
from voltapile.gateway.api.prompt import chat_ids
from voltapile.gateway.api.schema import chat_request
from voltapile.gateway.api.services import SERVICES, off_loop, read_body
from voltapile.gateway.tokenizer import Tokenizer

MAX_CONTENT = 4 << 20  # characters; each may be a token, and one takes 150 bytes while it is found


async def tokenize(request: web.Request) -> web.Response:
    """{"content", "add_special": false, "parse_special": true, "with_pieces": false}, or vLLM's
    {"prompt", "add_special_tokens": true} or {"messages"}."""
    services = request.app[SERVICES]
    tokenizer, body = services.tokenizer, await read_body(request)
    fields = await off_loop(len(body), Fields.parse, body)
    if fields.values.get("messages") is not None:
        known = tokenizer.vocab_size, services.defaults
        chat = await off_loop(len(body), chat_request, body, *known)
        ids = await chat_ids(services, chat)
    else:
        ids = await off_loop(len(body), _ids, tokenizer, fields)
    counts = {"count": len(ids), "max_model_len": services.plan.context}
    pieces = tokenizer if fields.flag("with_pieces") else None
    return await off_loop(len(body), _answer, ids, counts, pieces)


async def detokenize(request: web.Request) -> web.Response:
    """{"tokens": [ids]}; control tokens show their names. The text comes under both names."""
    body = await read_body(request)
    content = await off_loop(len(body), _content, request.app[SERVICES].tokenizer, body)
    return json_response({"content": content, "prompt": content})


def _ids(tokenizer: Tokenizer, fields: Fields) -> list[int]:
    is_vllms = fields.values.get("content") is None and fields.values.get("prompt") is not None
    name = "prompt" if is_vllms else "content"
    text = fields.text(name)
    if text is None:
        raise bad_request("'content' is missing", "content", "missing_required_parameter")
    if len(text) > MAX_CONTENT:
        message = f"'{name}' has {len(text)} characters; at most {MAX_CONTENT} at once"
        raise bad_request(message, name, "out_of_range")
    special = "add_special_tokens" if is_vllms else "add_special"
    return tokenizer.encode(
        text,
        add_special=fields.flag(special, default=is_vllms),
        parse_special=fields.flag("parse_special", default=True),
    )


def _answer(ids: list[int], counts: dict[str, int], tokenizer: Tokenizer | None) -> web.Response:
    """tokenizer: if pieces are wanted."""
    tokens: list[Any] = ids
    if tokenizer is not None:
        tokens = [{"id": token, "piece": _piece(tokenizer, token)} for token in ids]
    return json_response({"tokens": tokens} | counts)


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
