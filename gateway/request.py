"""Request: one generation as the gateway sees it; Chunk: what its stream yields.

A request has known tokens (the prompt and what came back) and computed positions. A few more tokens
may be on their way in Steps that are in flight (`ahead`). Knows no text, sockets or clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from voltapile.workers.protocol import Sampling, Want


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


@dataclass
class Chunk:
    """Some more tokens of a stream.

    finish: "" (more will come) | "stop" (a stop id, which is the last of tokens) | "length" |
    "error" (error says what) | "cancelled". logprobs: as in protocol.Sampled, one entry a token,
    where they were wanted.
    """

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)

    def extend(self, later: Chunk) -> None:
        """Take in what came after this chunk."""
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.finish, self.error = later.finish, later.error


@dataclass(eq=False)
class Request:
    """One generation. The scheduler owns all fields below `want`."""

    id: int
    prompt: list[int]
    sampling: Sampling  # max_position is absolute and at most the context
    want: Want | None = None
    known: list[int] = field(default_factory=list)  # prompt + tokens that came back
    cached: int = 0  # prompt tokens that did not need computing, as another request had
    computed: int = 0  # positions that Steps sent so far compute
    ahead: int = 0  # sampling rows in flight
    state: State = State.WAITING
    slot: int = -1
    pages: list[list[int]] = field(default_factory=list)  # for each cache group, in order
    is_new: bool = True  # its slot has not been told the sampling parameters yet
    is_prefilling: bool = True  # its slot has not sampled yet, so its rows carry tokens

    def __post_init__(self) -> None:
        self.known = list(self.prompt)

    @property
    def total(self) -> int:
        """Tokens that are known or on their way."""
        return len(self.known) + self.ahead

    @property
    def generated(self) -> list[int]:
        return self.known[len(self.prompt) :]
