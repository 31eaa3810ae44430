"""Generation: one request's text as it comes out of the engine.

Turns chunks of token ids into deltas of text (detokenised, cut at stop strings) and keeps the
counts for usage and timings. It does not know which endpoint asked, nor how a delta is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from voltapile.gateway.api.errors import engine_error, unavailable
from voltapile.gateway.api.schema import Options
from voltapile.gateway.api.services import Services
from voltapile.gateway.detokenizer import Detokenizer
from voltapile.gateway.engine import Chunk
from voltapile.gateway.stop_strings import StopStrings
from voltapile.workers.protocol import Sampling

QUEUED_DELTAS = 64  # of several generations in one stream, before the engine's own merging sets in


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one choice. finish: "" while more will come, else "stop" or "length"."""

    index: int
    text: str
    tokens: list[int]
    finish: str
    is_first: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """One choice, whole."""

    index: int
    text: str
    tokens: list[int]
    finish: str


class Generation:
    """An asynchronous iterator of Delta. close() it always: that frees what the engine holds.

    prefix: text shown before the first token (echo).
    """

    def __init__(
        self,
        services: Services,
        prompt: list[int],
        options: Options,
        index: int = 0,
        prefix: str = "",
    ) -> None:
        self.index = index
        self.prompt_tokens = len(prompt)
        self.completion_tokens = 0  # the end-of-generation token counts
        self.finish = ""
        self._services = services
        self._prefix = prefix
        self._detokenizer = Detokenizer(services.tokenizer)
        self._stops = StopStrings(options.stop) if options.stop else None
        self._begun = self._interrupted = False
        self._start = self._first = self._last = time.monotonic()
        self._stream = services.engine.submit(prompt, _sampling(services, prompt, options))
        services.live.add(self)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        while not self.finish:
            delta = self._take(await self._next_chunk())
            if delta.text or delta.tokens or delta.finish:
                return delta
        raise StopAsyncIteration

    async def whole(self) -> Outcome:
        """Everything at once."""
        texts: list[str] = []
        tokens: list[int] = []
        async for delta in self:
            texts.append(delta.text)
            tokens += delta.tokens
        return Outcome(self.index, "".join(texts), tokens, self.finish)

    def interrupt(self) -> None:
        """The server stops: whoever reads gets an error instead of silence."""
        self._interrupted = True
        self._stream.cancel()

    def close(self) -> None:
        """The reader is done or gone. Safe to call twice."""
        if self in self._services.live:
            self._services.live.remove(self)
            self._stream.cancel()
            finish = self.finish or "cancelled"
            seconds = self._last - self._first
            self._services.metrics.generation_done(finish, self.completion_tokens, seconds)

    def timings(self) -> dict[str, Any]:
        """Counts and speeds under llama-server's names. The prompt's time includes any wait."""
        prompt_ms = (self._first - self._start) * 1000
        predicted_ms = (self._last - self._first) * 1000
        later = max(self.completion_tokens - 1, 0)  # the first token is the prompt's
        return {
            "prompt_n": self.prompt_tokens,
            "prompt_ms": round(prompt_ms, 3),
            "prompt_per_second": _rate(self.prompt_tokens, prompt_ms),
            "predicted_n": self.completion_tokens,
            "predicted_ms": round(predicted_ms, 3),
            "predicted_per_token_ms": round(predicted_ms / later, 3) if later else 0.0,
            "predicted_per_second": _rate(later, predicted_ms),
        }

    async def _next_chunk(self) -> Chunk:
        """The next chunk that holds something; its failure is raised."""
        async for chunk in self._stream:
            if self._interrupted or chunk.finish == "cancelled":
                break
            if chunk.finish == "error":
                self.finish = "error"
                raise engine_error(chunk.error or "the engine failed")
            if chunk.tokens or chunk.finish:
                return chunk
        self.finish = "cancelled"
        raise unavailable("the server is stopping")

    def _take(self, chunk: Chunk) -> Delta:
        is_first = self._clock()
        text, tokens, stopped = self._text(chunk)
        self.completion_tokens += len(tokens)
        if stopped:
            self.finish = "stop"
            self._stream.cancel()
        elif chunk.finish:
            self.finish = chunk.finish
            text += self._rest()
        if is_first:
            text = self._prefix + text
        return Delta(self.index, text, tokens, self.finish, is_first)

    def _clock(self) -> bool:
        """Notes the time; True for the first chunk."""
        self._last = time.monotonic()
        if self._begun:
            return False
        self._begun = True
        self._first = self._last
        self._services.metrics.first_token(self._first - self._start)
        return True

    def _text(self, chunk: Chunk) -> tuple[str, list[int], bool]:
        """Text to show, the tokens that count, and whether a stop string ended it.

        With stop strings token by token, so that drafted tokens after the string do not count.
        """
        tokens = chunk.tokens
        shown = tokens[:-1] if chunk.finish == "stop" else tokens  # the stop id has no text
        if self._stops is None:
            return self._detokenizer.push(shown), tokens, False
        text = ""
        for n, token in enumerate(shown, 1):
            more, stopped = self._stops.push(self._detokenizer.push([token]))
            text += more
            if stopped:
                return text, tokens[:n], True
        return text, tokens, False

    def _rest(self) -> str:
        """What was held back for more bytes or as a possible start of a stop string."""
        text = self._detokenizer.flush()
        if self._stops is None:
            return text
        more, stopped = self._stops.push(text)
        return more if stopped else more + self._stops.flush()


async def merged(generations: list[Generation]) -> AsyncGenerator[Delta, None]:
    """The deltas of all generations in the order of their arrival. Close it (aclosing)."""
    if len(generations) == 1:
        async for delta in generations[0]:
            yield delta
        return
    queue: asyncio.Queue[Delta | Exception] = asyncio.Queue(QUEUED_DELTAS)
    tasks = [asyncio.create_task(_pump(generation, queue)) for generation in generations]
    try:
        open_choices = len(generations)
        while open_choices:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            open_choices -= bool(item.finish)
            yield item
    finally:
        for task in tasks:
            task.cancel()


async def _pump(generation: Generation, queue: asyncio.Queue[Delta | Exception]) -> None:
    try:
        async for delta in generation:
            await queue.put(delta)
    except Exception as error:  # it is raised where the deltas are read
        await queue.put(error)


def usage(generations: list[Generation]) -> dict[str, int]:
    prompt = sum(generation.prompt_tokens for generation in generations)
    completion = sum(generation.completion_tokens for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _sampling(services: Services, prompt: list[int], options: Options) -> Sampling:
    room = services.plan.context - len(prompt)
    tokens = room if options.max_tokens is None else min(options.max_tokens, room)
    return Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        stop_ids=[] if options.ignore_eos else sorted(services.tokenizer.eog_ids),
        max_position=len(prompt) + tokens,
    )


def _rate(count: int, milliseconds: float) -> float:
    return round(count * 1000 / milliseconds, 3) if milliseconds > 0 else 0.0
