"""Generation: one choice as it comes out of the engine.

Turns chunks of token ids into deltas of text and keeps the counts for usage and timings. It does
not know which endpoint asked, nor how a delta is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from voltapile.gateway.api.bounds import Bounds
from voltapile.gateway.api.echo import Echo, TokenLogprob
from voltapile.gateway.api.errors import ApiError, engine_error, unavailable
from voltapile.gateway.api.options import Options
from voltapile.gateway.api.reading import Reading
from voltapile.gateway.api.services import Services
from voltapile.gateway.api.structured import refused
from voltapile.gateway.api.transcript import Piece, Transcript
from voltapile.gateway.dialects.dialect import Fragment
from voltapile.gateway.engine import Chunk
from voltapile.gateway.splitter import Splitter
from voltapile.workers.protocol import Sampling, Want

FREE = Bounds()


class Delta(msgspec.Struct):
    """A piece of one choice. text: of the content. finish: "" while more will come, else "stop",
    "tool_calls" or "length"."""

    index: int
    text: str
    tokens: list[int]
    finish: str
    is_first: bool
    logprobs: list[TokenLogprob] = []
    reasoning: str = ""
    calls: list[Fragment] = []


@dataclass(frozen=True, slots=True)
class Outcome:
    """One choice, whole. logprobs: None where they were not wanted."""

    index: int
    text: str
    tokens: list[int]
    finish: str
    logprobs: list[TokenLogprob] | None = None
    reasoning: str = ""
    calls: list[Fragment] = field(default_factory=list)


class Generation:
    """Deltas, for whoever iterates or listens. close() it always: that frees what the engine holds.

    index: of the choice; `options.n` of them in a row have the same prompt. echo: the prompt, if
    the text begins with it. reading: what else than content the text may be.
    """

    def __init__(
        self,
        services: Services,
        prompt: list[int],
        options: Options,
        index: int = 0,
        echo: Echo | None = None,
        client: str = "",
        reading: Reading | None = None,
        bounds: Bounds = FREE,
    ) -> None:
        self.index = index
        self.prompt_tokens = len(prompt)
        self.completion_tokens = 0  # the end-of-generation token counts
        self.finish = ""
        self.hidden: np.ndarray | None = None  # where it is wanted, with the first token
        self._services = services
        self.options = options
        self._splitter = reading.splitter() if reading else None
        # Of the answer's tokens; None where the model is not known to reason.
        self.reasoning_tokens = 0 if reading and reading.reasoning else None
        shown = reading.shown if reading and self._splitter else ()
        self._transcript = Transcript(services.tokenizer, options, echo, shown)
        self._only_prompt = options.max_tokens == 0
        self._wants_logprobs = options.logprobs >= 0
        self._begun = self._interrupted = False
        self._start = self._first = self._last = time.monotonic()
        self._worked = 0.0  # as Chunk.seconds, of all
        repeat = index % options.n
        self.has_new_prompt = repeat == 0
        want = None
        if self._wants_logprobs:
            about_prompt = options.logprobs if echo else -1
            want = Want(logprobs=options.logprobs, prompt_logprobs=about_prompt)
        if options.hidden:
            want = Want(hidden=True)
        self.sampling = _sampling(services, prompt, options, repeat)
        bound = bounds._asdict() if bounds != FREE else {}
        self._stream = services.engine.submit(
            prompt, self.sampling, want, client, options.salt, **bound
        )
        services.live.add(self)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        if self.finish:
            raise StopAsyncIteration
        async for chunk in self._stream:
            if (delta := self._take(chunk)) is not None:
                return delta
        raise self._cut_off()

    def listen(self, tell: Callable[[], None]) -> None:
        """As Stream.listen."""
        self._stream.listen(tell)

    def take(self) -> Delta | None:
        """What has come since the last time, if it shows. Its failure is raised."""
        chunk = None if self.finish else self._stream.take()
        return None if chunk is None else self._take(chunk)

    async def whole(self) -> Outcome:
        """Everything at once."""
        deltas = [delta async for delta in self]
        logprobs = [each for delta in deltas for each in delta.logprobs]
        return Outcome(
            self.index,
            "".join(delta.text for delta in deltas),
            [token for delta in deltas for token in delta.tokens],
            self.finish,
            logprobs if self._wants_logprobs else None,
            "".join(delta.reasoning for delta in deltas),
            [fragment for delta in deltas for fragment in delta.calls],
        )

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
            metrics = self._services.metrics
            metrics.generation_done(finish, self.completion_tokens, self._decode_seconds)

    @property
    def cached_tokens(self) -> int:
        return self._stream.cached_tokens

    @property
    def has_begun(self) -> bool:
        """A token has come."""
        return self._begun

    @property
    def stop_string(self) -> str:
        """The one that ended it, or ""."""
        return self._transcript.stop_string

    @property
    def slot(self) -> int:
        """Where it is computed, or was; -1 while it waits."""
        return self._stream.request.last_slot

    @property
    def is_waiting(self) -> bool:
        """It has no slot now: it never had one, or was sent back."""
        return self._stream.request.slot < 0

    @property
    def number(self) -> int:
        """Of the request, counted by the engine."""
        return self._stream.request.id

    def progress(self) -> dict[str, int]:
        """How much of the prompt has been sent to be computed, under llama-server's names."""
        request = self._stream.request
        end = time.monotonic() if not self._begun else self._first
        return {
            "total": self.prompt_tokens,
            "cache": self.cached_tokens,
            "processed": min(request.computed, self.prompt_tokens),
            "time_ms": round((end - self._start) * 1000),
        }

    def timings(self) -> dict[str, Any]:
        """Counts and speeds under llama-server's names. The prompt's time includes any wait."""
        computed = self.prompt_tokens - self.cached_tokens
        predicted_ms = self._decode_seconds * 1000
        prompt_ms = max(0.0, (self._last - self._start) * 1000 - predicted_ms)
        later = max(self.completion_tokens - 1, 0)  # the first token is the prompt's
        return {
            "cache_n": self.cached_tokens,
            "prompt_n": computed,
            "prompt_ms": round(prompt_ms, 3),
            "prompt_per_token_ms": round(prompt_ms / computed, 3) if computed else 0.0,
            "prompt_per_second": _rate(computed, prompt_ms),
            "predicted_n": self.completion_tokens,
            "predicted_ms": round(predicted_ms, 3),
            "predicted_per_token_ms": round(predicted_ms / later, 3) if later else 0.0,
            "predicted_per_second": _rate(later, predicted_ms),
        }

    @property
    def _decode_seconds(self) -> float:
        """From the first token to the last; what came together, as a busy gateway finds it, took
        the workers as long as they say."""
        return max(self._last - self._first, self._worked)

    def _take(self, chunk: Chunk) -> Delta | None:
        if self._interrupted or chunk.finish == "cancelled":
            raise self._cut_off()
        if chunk.finish == "error":
            self.finish = "error"
            raise engine_error(chunk.error or "the engine failed")
        if chunk.finish == "refused":
            self.finish = "error"
            asked = self.options.constraint
            why = f"this answer cannot follow it any further: {chunk.error}"
            raise refused(asked.param if asked else "tools", why)
        if not chunk.tokens and not chunk.finish:
            return None
        self._last = time.monotonic()
        self._worked += chunk.seconds
        is_first = not self._begun
        if is_first:
            self._begin()
        if chunk.hidden is not None:
            self.hidden = chunk.hidden
        if self._only_prompt:  # the engine does not go without a token
            chunk = Chunk(finish="length", prompt_logprobs=chunk.prompt_logprobs)
        if self._splitter is not None:
            return self._split(self._splitter, chunk, is_first)
        piece = self._transcribed(chunk)
        return Delta(self.index, piece.text, piece.tokens, self.finish, is_first, piece.logprobs)

    def _transcribed(self, chunk: Chunk) -> Piece:
        piece = self._transcript.push(chunk)
        self.completion_tokens += len(piece.tokens)
        self.finish = "stop" if piece.stopped else chunk.finish
        if piece.stopped:
            self._stream.cancel()
        return piece

    def _split(self, splitter: Splitter, chunk: Chunk, is_first: bool) -> Delta | None:
        """None: nothing of it shows yet."""
        delta = Delta(self.index, "", [], "", is_first)
        for part in _one_by_one(chunk) if splitter.may_turn else [chunk]:
            if splitter.is_reasoning and self.reasoning_tokens is not None:
                self.reasoning_tokens += len(part.tokens)
            piece = self._transcribed(part)
            split = splitter.push(piece.text)
            if splitter.is_over and not self.finish:
                self.finish = "stop"
                self._stream.cancel()
            for each in (split, splitter.flush(self.finish == "length") if self.finish else None):
                if each is not None:
                    delta.text += each.content
                    delta.reasoning += each.reasoning
                    delta.calls += each.calls
            delta.tokens += piece.tokens
            delta.logprobs += piece.logprobs
            if self.finish:
                break
        if self.finish == "stop" and splitter.has_calls:
            self.finish = "tool_calls"
        delta.finish = self.finish
        shows = is_first or delta.finish or delta.text or delta.reasoning or delta.calls
        return delta if shows or delta.logprobs or self.options.return_tokens else None

    def _cut_off(self) -> ApiError:
        self.finish = "cancelled"
        return unavailable("the server is stopping")

    def _begin(self) -> None:
        self._begun, self._first = True, self._last
        self._services.metrics.first_token(self._first - self._start)


def started(
    services: Services,
    prompts: list[list[int]],
    options: Options,
    client: str,
    echoes: Sequence[Echo] | None = None,
    reading: Reading | None = None,
    bounds: Bounds = FREE,
) -> list[Generation]:
    """n generations a prompt, all at once; none at all if the engine does not take every one.

    client: as Engine.submit wants it.
    """
    assert bounds.guide or not options.constraint, "a grammar that nobody has compiled"
    generations: list[Generation] = []
    try:
        for i, prompt in enumerate(prompts):
            echo = echoes[i] if echoes else None
            for index in range(i * options.n, (i + 1) * options.n):
                each = bounds.another()
                one = Generation(services, prompt, options, index, echo, client, reading, each)
                generations.append(one)
    except Exception:
        for generation in generations:
            generation.close()
        raise
    return generations


def usage(generations: list[Generation]) -> dict[str, Any]:
    """A prompt of several choices counts once."""
    asked = [generation for generation in generations if generation.has_new_prompt]
    prompt = sum(generation.prompt_tokens for generation in asked)
    completion = sum(generation.completion_tokens for generation in generations)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(g.cached_tokens for g in asked)},
    }
    reasoning = [g.reasoning_tokens for g in generations if g.reasoning_tokens is not None]
    if reasoning:
        counts["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
    return counts


def _one_by_one(chunk: Chunk) -> list[Chunk]:
    """A chunk for each token, the last of them with what the chunk tells beside tokens."""
    if len(chunk.tokens) < 2:
        return [chunk]
    rows = [[row] for row in chunk.logprobs] or [[] for _ in chunk.tokens]
    parts = [Chunk([t], logprobs=row) for t, row in zip(chunk.tokens, rows, strict=True)]
    parts[-1].finish = chunk.finish
    return parts


def _sampling(services: Services, prompt: list[int], options: Options, repeat: int) -> Sampling:
    """repeat: which of the n choices of its prompt this is."""
    room = services.plan.context - len(prompt)
    # A grammar that is complete lets nothing but the end come.
    is_endless = options.ignore_eos and not options.constraint
    ends = frozenset() if is_endless else services.tokenizer.eog_ids
    tokens = room if options.max_tokens is None else min(max(options.max_tokens, 1), room)
    return Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        penalty_window=options.penalty_window,
        logit_bias=options.logit_bias,
        seed=(options.seed + repeat) % 2**64,
        stop_ids=sorted(ends.union(options.stop_ids)),
        max_position=len(prompt) + tokens,
    )


def _rate(count: int, milliseconds: float) -> float:
    return round(count * 1000 / milliseconds, 3) if milliseconds > 0 else 0.0
