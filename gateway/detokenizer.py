"""The text of an answer while it grows: tokens in, whole characters out.

A character's bytes may be spread over tokens; they are held back until it is complete. All pieces
together equal the one-shot decoding of all tokens, whatever the split. It knows one answer only,
and nothing of stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Container, Iterable

from voltapile.gateway.tokenizer import Tokenizer


class Detokenizer:
    """Goes on from a prompt, so the first space of a SentencePiece answer stays.

    special, shown: as in Tokenizer.join."""

    def __init__(
        self, tokenizer: Tokenizer, special: bool = False, shown: Container[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._special, self._shown = special, shown
        self._rest = b""  # the beginning of a character

    def push(self, ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        data = self._rest + self._tokenizer.join(ids, special=self._special, shown=self._shown)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never became complete."""
        rest, self._rest = self._rest, b""
        return rest.decode("utf-8", "replace")
