"""Transcript: the text of one answer, and the log-probabilities that go with it.

Tokens in, pieces of text out: characters spread over tokens and possible beginnings of stop strings
are held back, and a token's log-probability leaves with the text that it began. It does not know
where tokens come from, nor how a piece is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass

import msgspec
from voltapile.gateway.api.echo import Echo, Row, TokenLogprob, token_logprob
from voltapile.gateway.api.errors import engine_error
from voltapile.gateway.api.options import Options
from voltapile.gateway.detokenizer import Detokenizer
from voltapile.gateway.request import Chunk
from voltapile.gateway.stop_strings import StopStrings
from voltapile.gateway.tokenizer import Tokenizer


class Piece(msgspec.Struct):
    """What some tokens gave. tokens: those that count; all of them unless a stop string came."""

    text: str = ""
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    stopped: bool = False  # by a stop string


@dataclass(frozen=True, slots=True)
class _Held:
    entry: TokenLogprob
    end: int  # it leaves when so many characters have


class Transcript:
    """push(chunk) for each chunk; a chunk with a finish gives all that was held back.

    echo: what the text begins with. With it the token that ends an answer has a log-probability
    too, so that there is one for each token of the prompt and of the answer. shown: control tokens
    whose text counts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: Options,
        echo: Echo | None = None,
        shown: Container[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, shown=shown)
        self._stops = StopStrings(options.stop) if options.stop else None
        self._wants_logprobs = options.logprobs >= 0
        self._held: deque[_Held] = deque()
        self._echo = echo
        self._scores_end = echo is not None and self._wants_logprobs
        self._decoded = len(echo.text) if echo else 0  # characters, those held back included
        self._shown = self._decoded

    @property
    def stop_string(self) -> str:
        """The one that ended the answer, or ""."""
        return self._stops.met if self._stops else ""

    def push(self, chunk: Chunk) -> Piece:
        """A stop id is the last of a chunk's tokens, and has no text."""
        shown = chunk.tokens[:-1] if chunk.finish == "stop" else chunk.tokens
        if self._stops is None and not self._wants_logprobs:
            piece = Piece(self._detokenizer.push(shown), chunk.tokens)
        else:
            piece = self._one_by_one(chunk, shown)
        if chunk.finish and not piece.stopped:
            self._end(piece)
            if self._scores_end and chunk.finish == "stop":
                piece.logprobs.append(self._entry(chunk.logprobs[-1]))
        if self._echo is not None:
            self._begin(piece, chunk)
        return piece

    def _begin(self, piece: Piece, chunk: Chunk) -> None:
        """The prompt, before the first of what was generated."""
        echo, self._echo = self._echo, None
        assert echo is not None
        piece.text = echo.text + piece.text
        if self._wants_logprobs:
            piece.logprobs = echo.logprobs(chunk.prompt_logprobs) + piece.logprobs

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

    def _hold(self, row: Row, characters: int) -> None:
        """A token without a whole character leaves with the one that it began."""
        self._held.append(_Held(self._entry(row), self._decoded + max(1, characters)))

    def _entry(self, row: Row) -> TokenLogprob:
        return token_logprob(self._tokenizer, row, self._decoded)

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
