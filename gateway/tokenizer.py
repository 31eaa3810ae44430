"""Text to token ids and back, from the `tokenizer.ggml.*` keys of a GGUF file.

Special tokens are cut out first, then bpe.py's rules hold for what lies between. A Tokenizer does
not change after it is built; `encode` releases the GIL and may run in several threads. It does not
know about chat templates (template.py) nor about the pieces of an unfinished answer
(detokenizer.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Mapping
from itertools import accumulate
from typing import Any, Protocol

import tokenizers
from voltapile.gateway import bpe
from voltapile.gateway.vocabulary import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    TokenizerError,
    Vocabulary,
)

__all__ = ["Tokenizer", "TokenizerError"]

HIDDEN = (CONTROL, UNKNOWN)  # kinds that are no part of an answer's text


class HasMetadata(Protocol):
    """A Gguf, as far as a tokenizer needs it."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...


class Tokenizer:
    """One vocabulary; bos_id and eos_id are None where the file names none.

    strips_prefix: a space before a whole text is none of its own.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        parts = bpe.build(vocabulary)
        # Packed, as a quarter of a million small objects take 50 MB; nothing else is kept twice.
        self._kinds = bytes(vocabulary.kinds)
        self._bytes = b"".join(parts.token_bytes)
        self._starts = array("I", accumulate(map(len, parts.token_bytes), initial=0))
        self.strips_prefix = parts.strips_prefix
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eog_ids = vocabulary.eog_ids
        self.add_bos = parts.add_bos if vocabulary.add_bos is None else vocabulary.add_bos
        self.add_eos = bool(vocabulary.add_eos)
        # Two front ends share one model; they differ in the texts that count as special tokens.
        self._plain = _front_end(parts, vocabulary, USER_DEFINED)
        self._special = _front_end(parts, vocabulary, USER_DEFINED, CONTROL, UNKNOWN)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        return cls(Vocabulary.from_metadata(metadata))

    @classmethod
    def from_gguf(cls, gguf: HasMetadata) -> Tokenizer:
        return cls.from_metadata(gguf.metadata)

    @property
    def vocab_size(self) -> int:
        return len(self._kinds)

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """add_special: bos and eos, as the file asks. parse_special: control tokens written in
        the text become their ids; otherwise they are plain text (user-defined ones never are)."""
        front_end = self._special if parse_special else self._plain
        # The batch call, because the library holds the GIL during a single encode.
        encoding = front_end.encode_batch_fast([_well_formed(text)], add_special_tokens=False)
        ids: list[int] = encoding[0].ids
        if add_special and self.add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def encode_chat(self, rendered: str) -> list[int]:
        """The ids of a rendered chat template: special tokens count, and bos comes once, even if
        template and file both ask for it. Special-looking text that a user wrote counts too, as
        in other servers; whoever must prevent that cleans the messages before rendering."""
        ids = self.encode(rendered, add_special=False)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of a whole sequence; bytes that are not UTF-8 become U+FFFD."""
        text = self.join(ids, special=special).decode("utf-8", "replace")
        return text[1:] if self.strips_prefix and text.startswith(" ") else text

    def join(
        self, ids: Iterable[int], *, special: bool = False, shown: Container[int] = ()
    ) -> bytes:
        """The bytes of tokens in a row; control tokens are nothing unless `special` or `shown`."""
        data, starts, kinds = self._bytes, self._starts, self._kinds
        parts = []
        for i in ids:
            if not 0 <= i < len(kinds):
                self._check(i)
            if special or kinds[i] not in HIDDEN or i in shown:
                parts.append(data[starts[i] : starts[i + 1]])
        return b"".join(parts)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; for a control token those of its name."""
        self._check(token)
        return self._bytes[self._starts[token] : self._starts[token + 1]]

    def is_special(self, token: int) -> bool:
        """True for control and unknown tokens, which are no part of an answer's text."""
        self._check(token)
        return self._kinds[token] in HIDDEN

    def _check(self, token: int) -> None:
        if not 0 <= token < len(self._kinds):
            raise TokenizerError(
                f"token id {token} is outside the vocabulary of {len(self._kinds)} tokens"
            )


def _front_end(parts: bpe.Bpe, vocabulary: Vocabulary, *kinds: int) -> tokenizers.Tokenizer:
    front_end = tokenizers.Tokenizer(parts.model)
    if parts.normalizer is not None:
        front_end.normalizer = parts.normalizer
    if parts.pre_tokenizer is not None:
        front_end.pre_tokenizer = parts.pre_tokenizer
    # normalized=False: they are cut out of the text as written, before NFC or anything else.
    front_end.add_tokens(
        [
            tokenizers.AddedToken(vocabulary.tokens[i], special=True, normalized=False)
            for i in vocabulary.of_kind(*kinds)
        ]
    )
    return front_end


def _well_formed(text: str) -> str:
    """Lone surrogates (a JSON escape can bring one) have no UTF-8 form: they become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
