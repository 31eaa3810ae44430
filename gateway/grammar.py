"""Grammars: what an answer must look like, and which tokens may come next, by llguidance.

A Grammar is compiled once, a Guide follows one answer of it. Neither knows HTTP nor the scheduler.
llguidance is built with Rust and may be absent on POWER: then every grammar is refused.
"""

from __future__ import annotations

import math
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from voltapile.gateway.tokenizer import Tokenizer

try:
    import llguidance
except ImportError:  # pragma: no cover  (no wheel for this machine)
    llguidance = None  # type: ignore[assignment]

_llguidance: Any = llguidance  # None, where it is not there

MAX_SOURCE = 1 << 20  # characters of a grammar: compiling one takes a second or two at most
# Of those whose beginning is looked at: of 900,000 llguidance copies tokens for 0.1 s with the GIL.
CHECKED_SOURCE = 1 << 16
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
KEPT = 32  # compiled grammars
SEEN_MASKS = 16  # after which a Pace is known
# Said of a token; all else that llguidance says of an answer is the fault of its grammar.
NOT_ALLOWED = "satisfy the grammar"
REMEMBERED = 0.99  # of the slowest mask, with each that comes: 5 ms are 2 ms after 91 masks
# A row of a parser's chart, a lexer's states: what one token may cost. The work of compiling, too.
LIMITS = {"initial_lexer_fuel": 2_000_000, "max_grammar_size": 500_000, "verbose_errors": False}


class GrammarError(ValueError):
    """A grammar that cannot be used; the text may be shown to the caller."""


class Pace:
    """How long masks of one grammar may take: as the slowest of late ones did, whichever answer it
    was for. Unknown (worst is inf) before some have been seen."""

    def __init__(self) -> None:
        self._unseen, self._worst = SEEN_MASKS, 0.0

    @property
    def worst(self) -> float:
        return math.inf if self._unseen > 0 else self._worst

    def note(self, seconds: float) -> None:
        self._unseen -= 1
        self._worst = max(seconds, REMEMBERED * self._worst)


class Guide:
    """One answer: mask says which tokens may come first, advance(tokens) which may come next.

    seconds: what the last mask took of a CPU, and pace what those of its grammar did, for who
    advances it to note. Not for two threads at once.
    """

    seconds = math.inf

    def __init__(self, matcher: Any, ends: np.ndarray) -> None:
        self._matcher, self._ends, self.pace = matcher, ends, Pace()
        self.mask = self._allowed()

    def copy(self) -> Guide:
        """For another answer; only before the first token."""
        copy = Guide.__new__(Guide)
        copy._matcher, copy._ends, copy.mask = self._matcher.deep_copy(), self._ends, self.mask
        copy.pace = self.pace
        return copy

    def advance(self, tokens: Sequence[int]) -> np.ndarray:
        """uint32 [ceil(V / 32)], token t in bit t % 32 of word t // 32. Raises GrammarError where
        a limit is met or nothing may follow, ValueError for a token that the mask has not."""
        if not self._matcher.consume_tokens(list(tokens)):
            why = _first_line(self._matcher.get_error())
            raise ValueError(why) if not why or NOT_ALLOWED in why else GrammarError(why)
        return self._allowed()

    def _allowed(self) -> np.ndarray:
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return self._ends
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(self._ends)]
        if self._matcher.is_error():
            raise GrammarError(_first_line(self._matcher.get_error()))
        if not mask.any():
            raise GrammarError("nothing fits it")
        return mask


class Grammars:
    """Compiles Lark, of llguidance's kind, for one vocabulary. Safe to use from several threads:
    who asks for a grammar that is being compiled waits for it, and for no other."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # of what is kept
        self._kept: OrderedDict[str, Future[Guide]] = OrderedDict()
        self._making = threading.Lock()  # of the vocabulary
        self._vocabulary: Any = None  # made when it is first needed: it takes half a second

    def guide(self, lark: str) -> Guide:
        """Raises GrammarError."""
        if _llguidance is None:
            raise GrammarError("the package llguidance is not installed on this server")
        if len(lark) > MAX_SOURCE:
            raise GrammarError(f"it has {len(lark)} characters; at most {MAX_SOURCE}")
        with self._lock:
            is_new = lark not in self._kept
            found = self._kept.setdefault(lark, Future())
            self._kept.move_to_end(lark)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        if is_new:
            self._compile(lark, found)
        return found.result().copy()

    def _compile(self, lark: str, found: Future[Guide]) -> None:
        """What fails is told to those who wait already, and not kept."""
        try:
            found.set_result(self._compiled(lark))
        except BaseException as error:  # Rust's panics, too, or others would wait for ever
            with self._lock:
                if self._kept.get(lark) is found:
                    del self._kept[lark]
            found.set_exception(error)

    def _compiled(self, lark: str) -> Guide:
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer)
        limits = _llguidance.LLParserLimits(**LIMITS)
        source = _llguidance.LLMatcher.grammar_from_lark(lark)
        matcher = _llguidance.LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        ends = np.zeros(-(-self._tokenizer.vocab_size // 32), np.uint32)
        for token in self._tokenizer.eog_ids:
            ends[token // 32] |= np.uint32(1 << token % 32)
        if matcher.is_stopped() and not matcher.is_accepting():
            raise GrammarError("nothing fits it")
        if len(lark) <= CHECKED_SOURCE:
            _check_beginning(matcher.deep_copy())
        return Guide(matcher, ends)


def _check_beginning(matcher: Any) -> None:
    """That text which is forced from the beginning on has an end. Raises GrammarError."""
    matcher.compute_bitmask()  # finds it without the GIL; what comes then is a matter of copying
    forced = matcher.compute_ff_tokens()
    if forced and matcher.consume_tokens(forced):
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(f"what it forces is too long: {_first_line(matcher.get_error())}")


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eog_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in ids]
        self.special_token_ids = [i for i in ids if tokenizer.is_special(i)]

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special=False, parse_special=False)


def _vocabulary(tokenizer: Tokenizer) -> Any:
    if not tokenizer.eog_ids:
        raise GrammarError("this model's vocabulary has no token that ends an answer")
    return _llguidance.LLTokenizer(
        _llguidance.TokenizerWrapper(_Vocabulary(tokenizer)),
        n_vocab=tokenizer.vocab_size,
        eos_token=sorted(tokenizer.eog_ids),
        slices=_llguidance.LLTokenizer.json_slices(),
    )


def lark_of(gbnf: str) -> str:
    """llama.cpp's form of a grammar, or llguidance's own, which is left as it is. Raises
    GrammarError."""
    if _llguidance is None or len(gbnf) > MAX_SOURCE:
        return gbnf[: MAX_SOURCE + 1]  # `guide` refuses it
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(_plain(gbnf))).removeprefix("%llguidance {}").lstrip()
    except Exception as error:  # it raises whatever Python can
        raise GrammarError(str(error) or type(error).__name__) from error


def _plain(gbnf: str) -> str:
    """With characters in place of what the converter does not read: \\u, \\U and CR LF."""
    if "::=" not in gbnf:
        return gbnf
    return _ESCAPE.sub(_unescaped, gbnf.replace("\r\n", "\n"))


def _unescaped(escape: re.Match[str]) -> str:
    code = int(escape[1] or escape[2] or "0", 16)
    if code < 0x80:
        return f"\\x{code:02x}" if code else escape[0]
    is_character = code < 0x110000 and not 0xD800 <= code < 0xE000
    return chr(code) if is_character else escape[0]


def lark_of_regex(regex: str) -> str:
    """A whole answer that matches."""
    if _llguidance is None:
        return regex
    return f"start: /{_llguidance.regex_to_lark(regex)}/"


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]
