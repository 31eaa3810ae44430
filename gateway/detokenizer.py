"""The text of an answer while it grows: tokens in, whole characters out.

A character's bytes may be spread over tokens; they are held back until it is complete. All pieces
together equal the one-shot decoding of all tokens, whatever the split. It knows one answer only,
and nothing of stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from voltapile.gateway.tokenizer import Tokenizer


class Detokenizer:
    """Goes on from a prompt, so the first space of a SentencePiece answer stays."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        return self._decoder.decode(self._tokenizer.join(ids, special=self._special))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never became complete."""
        return self._decoder.decode(b"", final=True)
