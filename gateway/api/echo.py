"""Echo: a completion's prompt as the beginning of its text, with the prompt's log-probabilities.

It knows the prompt as the client gave it and as token ids, and nothing of what is generated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from voltapile.gateway.api.errors import engine_error
from voltapile.gateway.detokenizer import Detokenizer
from voltapile.gateway.tokenizer import Tokenizer

FLOOR = -9999.0  # OpenAI's figure for a token that could not come; JSON has no infinity

Row = list[tuple[int, float]]  # (id, log-probability), as in protocol.Sampled


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token. top: the best alternatives, best first. offset: where its text begins.

    logprob None: nothing came before it. id, top_ids: the same tokens by number.
    """

    token: bytes
    logprob: float | None
    top: list[tuple[bytes, float]]
    offset: int
    id: int = field(default=-1, compare=False)
    top_ids: tuple[int, ...] = field(default=(), compare=False)


def token_logprob(tokenizer: Tokenizer, row: Row, offset: int) -> TokenLogprob:
    """row: the token itself first."""
    (token, logprob), *top = row
    data = tokenizer.token_bytes
    best = [(data(i), max(x, FLOOR)) for i, x in top]
    ids = tuple(i for i, _ in top)
    return TokenLogprob(data(token), max(logprob, FLOOR), best, offset, token, ids)


class Echo:
    """given: a text, or ids, which show as their text with control tokens by name."""

    def __init__(self, tokenizer: Tokenizer, given: str | list[int], ids: list[int]) -> None:
        self._tokenizer, self._given, self._ids = tokenizer, given, ids
        self.text = given if isinstance(given, str) else tokenizer.decode(given, special=True)

    def logprobs(self, rows: list[Row]) -> list[TokenLogprob]:
        """An entry for each token of the prompt, those that the tokenizer added too."""
        if len(rows) < len(self._ids):
            raise engine_error("the worker sent no log-probabilities of the prompt")
        data = self._tokenizer.token_bytes
        pairs = zip(self._ids, self._offsets(), rows[: len(self._ids)], strict=True)
        return [
            token_logprob(self._tokenizer, row, offset)
            if row
            else TokenLogprob(data(token), None, [], offset)
            for token, offset, row in pairs
        ]

    def _offsets(self) -> list[int]:
        """Where each token begins in `text`; what the tokenizer added takes no room there.

        Where a text was normalised before it was cut into tokens, its end may be off a little.
        """
        tokenizer, ids = self._tokenizer, self._ids
        first, last = 0, len(ids)
        if isinstance(self._given, str):
            first += tokenizer.add_bos and ids[:1] == [tokenizer.bos_id]
            last -= tokenizer.add_eos and ids[first:][-1:] == [tokenizer.eos_id]
        shown = tokenizer.join(ids[first:last], special=True)
        at = -1 if tokenizer.strips_prefix and shown.startswith(b" ") else 0
        offsets, detokenizer = [0] * first, Detokenizer(tokenizer, special=True)
        for token in ids[first:last]:
            offsets.append(min(max(0, at), len(self.text)))
            at += len(detokenizer.push([token]))
        return offsets + [len(self.text)] * (len(ids) - last)
