"""Request: one generation as the gateway sees it; Chunk: what its stream yields.

A request has known tokens (the prompt and what came back) and computed positions. A few more tokens
may be on their way in Steps that are in flight (`ahead`). Knows no text, sockets or clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import msgspec
import numpy as np
from voltapile.gateway.grammar import Guide
from voltapile.gateway.thought import ThoughtLimit
from voltapile.workers.protocol import MAX_STOP_IDS, Row, Sampling, Want


class State(Enum):
    WAITING = "waiting"  # has no slot; also after a preemption
    RUNNING = "running"  # has a slot and pages
    FINISHED = "finished"


class Refused(ValueError):
    """The caller's fault, found before any work. code and param are OpenAI's error fields."""

    def __init__(self, message: str, code: str = "invalid_value", param: str = "prompt") -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class Chunk(msgspec.Struct):
    """Some more tokens of a stream.

    finish: "" (more will come) | "stop" (a stop id, which is the last of tokens) | "length" |
    "error" (error says what) | "refused" (the grammar is at fault, as error says) | "cancelled".
    logprobs, prompt_logprobs, hidden: as in protocol.Sampled, where they were wanted. seconds: that
    workers spent on its tokens, but for the first of a stream, which is the prompt's.
    """

    tokens: list[int] = []
    finish: str = ""
    error: str = ""
    logprobs: list[list[tuple[int, float]]] = []
    prompt_logprobs: list[list[tuple[int, float]]] = []
    hidden: np.ndarray | None = None
    seconds: float = 0.0

    def extend(self, later: Chunk) -> None:
        """Take in what came after this chunk."""
        self.seconds += later.seconds
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.finish, self.error = later.finish, later.error
        self.hidden = self.hidden if later.hidden is None else later.hidden


@dataclass(eq=False)
class Request:
    """One generation. The scheduler owns all fields below `salt`.

    client: who asked; clients take turns. salt: what the tokens do not tell of what they stand for.
    """

    id: int
    prompt: list[int]
    sampling: Sampling  # max_position is absolute and at most the context
    want: Want | None = None
    client: str = ""
    salt: bytes = b""
    guide: Guide | None = None  # the grammar of the answer
    limit: ThoughtLimit | None = None  # of its reasoning
    mask: np.ndarray | None = None  # what may follow `known`; None: it is being computed
    known: list[int] = field(default_factory=list)  # prompt + tokens that came back
    cached: int = 0  # prompt tokens that did not need computing, as another request had
    computed: int = 0  # positions that Steps sent so far compute
    ahead: int = 0  # sampling rows in flight
    state: State = State.WAITING
    slot: int = -1
    last_slot: int = -1  # the one that it has, or had
    is_new: bool = True  # its slot has not been told the sampling parameters yet
    is_prefilling: bool = True  # its slot has not sampled yet, so its rows carry tokens
    crashes: int = 0  # weight of the losses of the worker that it may have caused
    crashed_at: int = 0  # with more known tokens than that it has not
    is_retried: bool = False  # it failed on shared pages, and is computed anew without them
    # Kept by PageTables:
    pages: list[list[int]] = field(default_factory=list)  # for each cache group, by position
    hidden: list[int] = field(default_factory=list)  # how many first pages were given back
    room: int = 0  # positions that all tables cover
    shared: int = 0  # tokens whose pages another request has computed
    keys: list[bytes] = field(default_factory=list)  # of the whole blocks of known
    remembered: int = 0  # blocks that the prefix cache has been offered
    # Kept by Checkpoints:
    marks: frozenset[int] = frozenset()  # where chunks end, since states are kept there
    saved: list[tuple[int, int]] = field(default_factory=list)  # (position, checkpoint) not known
    restored: int = 0  # the checkpoint that it begins from, until its first Step
    rolled: bytes = b""  # the block of its answer whose states are kept until later ones are

    def __post_init__(self) -> None:
        self.known = list(self.prompt)

    @property
    def total(self) -> int:
        """Tokens that are known or on their way."""
        return len(self.known) + self.ahead

    @property
    def may_sample(self) -> bool:
        """All is known that binds the next token."""
        if self.guide is not None:
            return self.mask is not None and not self.ahead
        limit = self.limit
        return limit is None or not self.ahead or not limit.is_due(self.total - len(self.prompt))

    def enter(self, slot: int) -> None:
        """It is computed there from now on."""
        self.state = State.RUNNING
        self.slot = self.last_slot = slot

    def bind(self, guide: Guide | None, limit: ThoughtLimit | None) -> None:
        """What its tokens must keep to."""
        self.guide, self.limit = guide, limit
        self.mask = guide.mask if guide else None

    def bound(self, row: Row) -> Row:
        """A row that samples, with what binds its token."""
        row.mask = self.mask
        if self.limit is not None and not self.ahead:
            row.forced = self.limit.forced(self.generated)
        return row

    @property
    def generated(self) -> list[int]:
        return self.known[len(self.prompt) :]

    @property
    def chunk_limit(self) -> int:
        """How far a chunk of known tokens may go.

        The end of the prompt is an end also when generated tokens follow it (after a preemption),
        so that the prompt is always cut in the same places.
        """
        prompt = len(self.prompt)
        return prompt if self.computed < prompt else len(self.known)

    def must_stop(self, position: int) -> bool:
        """A chunk that has come so far ends there."""
        return position != self.computed and position in self.marks

    @property
    def can_share(self) -> bool:
        """Pages that were computed for others may be used: nothing else is wanted of them."""
        want = self.want
        wants_all = want is not None and (want.prompt_logprobs >= 0 or want.hidden)
        return not wants_all and not self.is_retried

    @property
    def needs_history(self) -> bool:
        """The device must know the tokens of a reused prefix."""
        sampling = self.sampling
        penalties = (sampling.presence_penalty, sampling.frequency_penalty)
        return sampling.repetition_penalty != 1.0 or penalties != (0.0, 0.0)


def limited(prompt: list[int], sampling: Sampling, context: int) -> Sampling:
    """`sampling` for this prompt, its limit cut to the context. Raises Refused if nothing can come
    of it."""
    last = min(sampling.max_position, context)
    if not prompt:
        raise Refused("the prompt is empty: it needs at least one token")
    if len(prompt) >= context:
        raise Refused(
            f"the prompt has {len(prompt)} tokens, and the context is {context}: "
            "at least one position must stay free",
            "context_length_exceeded",
        )
    if last <= len(prompt):
        raise Refused("at least one token must be asked for", param="max_tokens")
    if len(sampling.stop_ids) > MAX_STOP_IDS:
        raise Refused(f"more than {MAX_STOP_IDS} stop tokens", param="stop_token_ids")
    return msgspec.structs.replace(sampling, max_position=last, prompt_tokens=len(prompt))
