"""The records that cross between the gateway and the workers, and how they become ZeroMQ frames.

Frame 0 is one version byte and a msgpack array `[tag, fields...]`; fields are only ever appended,
each with a default. Every further frame is one raw array, named in frame 0 by its index, dtype and
shape; an empty array has none. No pickle, no method names: a worker is a fold over the Steps that
it reads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

VERSION = 1
# What the device holds for each slot, and so the most of a Sampling and a Want.
MAX_STOP_IDS = 16
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
NO_FRAME = -1  # index of an array without elements
CONTINUE = np.zeros(0, np.int32)  # tokens of a row that goes on from the token it sampled last


class ProtocolError(ValueError):
    """A message that this version cannot read."""


class Record(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """Base of everything on the wire: an array with the class's name as its tag."""


class Sampling(msgspec.Struct, array_like=True, kw_only=True):
    """How a request's tokens are chosen; sent once, with the first row of a request in a slot.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch those filters off.
    repetition_penalty looks at prompt and generated tokens, presence_penalty and frequency_penalty
    at generated ones, penalty_window: so many tokens back, 0: all of them. prompt_tokens: so many
    of a request's first tokens are its prompt, later ones were generated. See kernels/random.md.
    max_position: no token is sampled for this position or a later one (finish "length").
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    stop_ids: list[int] = []
    max_position: int = 2**31 - 1
    prompt_tokens: int = 0


class Want(msgspec.Struct, array_like=True, kw_only=True):
    """What the answers hold beside tokens; sent with `sampling`. Negative: not wanted; n: with n
    alternatives (at most MAX_LOGPROBS)."""

    logprobs: int = -1
    prompt_logprobs: int = -1
    hidden: bool = False  # pooled hidden state (embeddings)


class Row(msgspec.Struct, array_like=True, kw_only=True):
    """The part of one sequence that a Step computes.

    tokens[i] lies at cache position start + i; an empty array means "continue": the worker takes
    the token that it sampled last in this slot and the position after it, and `start` is ignored.
    pages: page ids to append to this slot's page table, one list for each cache group.
    sample: choose a token after the last of `tokens` (False for all but a prompt's last chunk).
    """

    slot: int
    start: int = 0
    tokens: np.ndarray = msgspec.field(default_factory=lambda: CONTINUE)  # int32[n]
    pages: list[list[int]] = []
    sample: bool = True
    drafts: int = 0  # positions reserved for drafts after the last token
    embeds: np.ndarray | None = None  # float32[n, D]: rows of a vision worker instead of tokens
    rope_positions: np.ndarray | None = (
        None  # int32[axes, n] where they differ from cache positions
    )
    history: np.ndarray | None = (
        None  # int32: tokens at positions 0 to start of a reused prefix (penalties, n-grams)
    )
    mask: np.ndarray | None = None  # uint32[ceil(V / 32)]: tokens that a grammar allows
    forced: int = -1  # this token is taken instead of a sampled one
    sampling: Sampling | None = None
    want: Want | None = None


class Copy(msgspec.Struct, array_like=True, kw_only=True):
    """A copy made before the rows of a Step run, in order. kind "page": from one page of a group to
    another; "checkpoint": a slot's states to the checkpoint `target`; "restore": back to a slot."""

    kind: str
    source: int
    target: int
    group: int = 0


class Step(Record):
    """One forward pass over a ragged batch, the same for all ranks. release: slots set free.

    rounds: so many passes, each with a Result, where all rows sample: in the later ones every row
    continues. The last is the one in which a row gives its last token, or none, or a Hold comes.
    interval: seconds for which Results may wait for those of the next rounds, but for prompts'.
    """

    id: int
    rounds: int = 1
    rows: list[Row] = []
    release: list[int] = []
    copy: list[Copy] = []
    interval: float = 0.0


class Hold(Record):
    """No more rounds of a Step than one, or than have begun. It comes too late without harm."""

    step: int


class Sampled(msgspec.Struct, array_like=True, kw_only=True):
    """What one sampling row gave.

    tokens: 1 + accepted drafts of each round; empty where the slot had finished before this Step.
    finish: "" | "stop" (a stop id; it is the last of tokens) | "length" | "error".
    logprobs: for each token, the chosen one's first, then as many of the best as were wanted, as
    (id, log-probability) pairs of the unmodified distribution. prompt_logprobs: the same for each
    token of the prompt, with the first answer; empty at position 0 and in a reused prefix.
    """

    slot: int
    tokens: list[int] = []
    finish: str = ""
    logprobs: list[list[tuple[int, float]]] = []
    drafted: list[int] = []
    accepted: list[int] = []
    prompt_logprobs: list[list[tuple[int, float]]] = []
    error: str = ""
    hidden: np.ndarray | None = None  # float32[D]: pooled, with the first answer


class Result(Record):
    """What a round of a Step produced, or several one after the other. seconds: the time that the
    worker spent. left: rounds that follow, if no Hold comes and no row ends."""

    id: int
    rows: list[Sampled] = []
    seconds: float = 0.0
    left: int = 0
    rounds: int = 1


class Ready(Record):
    """A worker has loaded `plan` (its id) and waits for Steps, all its slots empty.

    It is repeated until the gateway says something; instance differs between two processes.
    """

    name: str
    plan: str
    pages: list[int] = []
    slots: int = 0
    instance: int = 0


class Failed(Record):
    """A worker cannot go on. step: the Step's id; 0 before the first one, -1 when loading.

    cause: "stopped": this process or another rank was told to end; "gone": another's process ended
    without a word; "": neither, so that it is a fault of this rank or of another that says so
    itself.
    """

    name: str
    step: int = -1
    reason: str = ""
    cause: str = ""


class Stats(Record):
    """Counters of a worker; while it loads, "stage" and "fraction" among them."""

    name: str
    values: dict[str, float | str] = {}


class Stop(Record):
    """The gateway asks a worker to end."""

    reason: str = ""


Message = Step | Hold | Result | Ready | Failed | Stats | Stop


class _Codec(threading.local):
    """Coders of messages with arrays, which lie in other frames. A thread has its own, made once:
    making one costs more than a message."""

    def __init__(self) -> None:
        self.out: list[bytes | memoryview] = []
        self.given: Sequence[bytes | memoryview] = []
        self.encoder = msgspec.msgpack.Encoder(enc_hook=self._frame)
        self.decoder = msgspec.msgpack.Decoder(Message, dec_hook=self._array)

    def encode(self, message: Message) -> list[bytes | memoryview]:
        frames = self.out = [b""]
        frames[0] = _HEAD + self.encoder.encode(message)
        self.out = []
        return frames

    def decode(self, frames: Sequence[bytes | memoryview]) -> Message:
        self.given = frames
        try:
            return self.decoder.decode(memoryview(frames[0])[1:])
        finally:
            self.given = []

    def _frame(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"cannot send a {type(value).__name__}")
        if not value.size:
            return NO_FRAME, value.dtype.str, value.shape
        packed: Any = np.ascontiguousarray(value)
        self.out.append(memoryview(packed).cast("B"))
        return len(self.out) - 1, value.dtype.str, value.shape

    def _array(self, kind: type, value: Any) -> Any:
        index, dtype, shape = value
        if index == NO_FRAME:
            return _empty(kind, value)
        return np.frombuffer(self.given[index], np.dtype(dtype)).reshape(shape)


class _HasArraysError(TypeError):
    pass


def _continued(value: Any) -> msgspec.Raw:
    if value is not CONTINUE:
        raise _HasArraysError
    return _CONTINUED


def _empty(kind: type, value: Any) -> Any:
    index, dtype, shape = value
    if index != NO_FRAME:
        raise IndexError(f"there is no frame {index}")
    return np.zeros(shape, np.dtype(dtype))


_HEAD = bytes([VERSION])
_CONTINUED = msgspec.Raw(msgspec.msgpack.encode((NO_FRAME, CONTINUE.dtype.str, CONTINUE.shape)))
_codec = _Codec()
# Of messages without arrays, as most are. They remember nothing, so that threads can share them,
# and spare a token a look at numpy and at what belongs to the thread.
_encoder = msgspec.msgpack.Encoder(enc_hook=_continued)
_decoder = msgspec.msgpack.Decoder(Message, dec_hook=_empty)


def encode(message: Message) -> list[bytes | memoryview]:
    """Frames of `message`; arrays are not copied."""
    try:
        return [_HEAD + _encoder.encode(message)]
    except _HasArraysError:
        return _codec.encode(message)


def decode(frames: Sequence[bytes | memoryview]) -> Message:
    """The message in `frames`; arrays are read-only views of them. Raises ProtocolError."""
    if not frames or not len(frames[0]):
        raise ProtocolError("an empty message")
    if frames[0][0] != VERSION:
        raise ProtocolError(f"protocol version {frames[0][0]}, but this side speaks {VERSION}")
    try:
        if len(frames) == 1:
            return _decoder.decode(memoryview(frames[0])[1:])
        return _codec.decode(frames)
    except (msgspec.DecodeError, ValueError, TypeError, IndexError) as error:
        raise ProtocolError(f"unreadable message: {error}") from error
