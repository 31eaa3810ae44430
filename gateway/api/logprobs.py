"""How the two endpoints write log-probabilities: OpenAI's chat form and its older one.

It knows neither how they are found nor which of them are due (transcript.py, echo.py).
"""

from __future__ import annotations

from typing import Any

from voltapile.gateway.api.echo import TokenLogprob

NO_LOGPROBS: dict[str, Any] = {"logprobs": None}  # some clients insist on the key


def chat_logprobs(entries: list[TokenLogprob]) -> dict[str, Any]:
    """{"logprobs": {"content": [...]}}; half a character shows as U+FFFD, its bytes tell all."""
    content = [
        _token(entry.token, entry.logprob)
        | {"top_logprobs": [_token(token, logprob) for token, logprob in entry.top]}
        for entry in entries
    ]
    return {"logprobs": {"content": content, "refusal": None}}


def completion_logprobs(entries: list[TokenLogprob]) -> dict[str, Any]:
    """{"logprobs": {four lists}}; top_logprobs always holds the chosen token too.

    A prompt's first token has null in both, as nothing came before it.
    """
    tops = [_alternatives(entry) if entry.top else None for entry in entries]
    lists = {
        "tokens": [_name(entry.token) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": [entry.offset for entry in entries],
    }
    return {"logprobs": lists}


def _alternatives(entry: TokenLogprob) -> dict[str, float | None]:
    best = [*entry.top, (entry.token, entry.logprob)]
    return {_name(token): logprob for token, logprob in best}


def _token(token: bytes, logprob: float | None) -> dict[str, Any]:
    text = token.decode("utf-8", "replace")
    return {"token": text, "logprob": logprob, "bytes": list(token)}


def _name(token: bytes) -> str:
    """Distinct for distinct tokens, as it is a key."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
