"""Transcript: the text of one answer, and the log-probabilities that go with it.

Tokens in, pieces of text out: characters spread over tokens and possible beginnings of stop strings
are held back, and a token's log-probability leaves with the text that it began. It does not know
where tokens come from, nor how a piece is sent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from voltapile.gateway.api.errors import engine_error
from voltapile.gateway.api.options import Options
from voltapile.gateway.detokenizer import Detokenizer
from voltapile.gateway.request import Chunk
from voltapile.gateway.stop_strings import StopStrings
from voltapile.gateway.tokenizer import Tokenizer

FLOOR = -9999.0  # OpenAI's figure for a token that could not come; JSON has no infinity


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token. top: the best alternatives, best first. offset: where its text begins."""

    token: bytes
    logprob: float
    top: list[tuple[bytes, float]]
    offset: int


@dataclass(slots=True)
class Piece:
    """What some tokens gave. tokens: those that count; all of them unless a stop string came."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stopped: bool = False  # by a stop string


@dataclass(frozen=True, slots=True)
class _Held:
    entry: TokenLogprob
    end: int  # it leaves when so many characters have


class Transcript:
    """push(chunk) for each chunk; a chunk with a finish gives all that was held back."""

    def __init__(self, tokenizer: Tokenizer, options: Options) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(options.stop) if options.stop else None
        self._wants_logprobs = options.logprobs >= 0
        self._held: deque[_Held] = deque()
        self._decoded = 0  # characters, those held back included
        self._shown = 0

    def push(self, chunk: Chunk) -> Piece:
        """A stop id is the last of a chunk's tokens, and has neither text nor log-probability."""
        shown = chunk.tokens[:-1] if chunk.finish == "stop" else chunk.tokens
        if self._stops is None and not self._wants_logprobs:
            piece = Piece(self._detokenizer.push(shown), chunk.tokens)
        else:
            piece = self._one_by_one(chunk, shown)
        if chunk.finish and not piece.stopped:
            self._end(piece)
        return piece

    def _one_by_one(self, chunk: Chunk, shown: list[int]) -> Piece:
        """Token by token, so that drafted tokens after a stop string do not count."""
        if self._wants_logprobs and len(chunk.logprobs) != len(chunk.tokens):
            raise engine_error("the worker sent no log-probabilities")
        piece = Piece(tokens=chunk.tokens)
        for n, token in enumerate(shown):
            text = self._detokenizer.push([token])
            if self._wants_logprobs:
                self._hold(chunk.logprobs[n], len(text))
            self._show(piece, text)
            if piece.stopped:
                piece.tokens = chunk.tokens[: n + 1]
                break
        return piece

    def _show(self, piece: Piece, text: str) -> None:
        self._decoded += len(text)
        if self._stops is not None:
            text, piece.stopped = self._stops.push(text)
        piece.text += text
        self._shown += len(text)
        self._release(piece)

    def _hold(self, row: list[tuple[int, float]], characters: int) -> None:
        """A token without a whole character leaves with the one that it began."""
        (token, logprob), *top = row
        data = self._tokenizer.token_bytes
        best = [(data(i), max(x, FLOOR)) for i, x in top]
        entry = TokenLogprob(data(token), max(logprob, FLOOR), best, self._decoded)
        self._held.append(_Held(entry, self._decoded + max(1, characters)))

    def _release(self, piece: Piece) -> None:
        """Those whose text is shown; before a stop string also one that is shown in part."""
        while self._held:
            first = self._held[0]
            if first.end > self._shown and not (piece.stopped and first.entry.offset < self._shown):
                return
            piece.logprobs.append(self._held.popleft().entry)

    def _end(self, piece: Piece) -> None:
        self._show(piece, self._detokenizer.flush())
        if piece.stopped:
            return
        if self._stops is not None:
            piece.text += self._stops.flush()
        piece.logprobs += [held.entry for held in self._held]
        self._held.clear()
