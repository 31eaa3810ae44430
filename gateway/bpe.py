"""The two kinds of BPE vocabulary (`tokenizer.ggml.model`), told to the `tokenizers` library.

`gpt2` spells every byte as a printable character and cuts text with the regular expressions of
pretokenizers.py; `llama` is SentencePiece, where a merge is worth its token's score. This file
does not know about special tokens: tokenizer.py cuts them out before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, models, normalizers, pre_tokenizers
from voltapile.gateway.pretokenizers import PRE_TOKENIZERS
from voltapile.gateway.vocabulary import (
    BYTE,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    TokenizerError,
    Vocabulary,
)

SPACE = "▁"  # U+2581, how SentencePiece writes a space

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bpe:
    """A model, what is done to a text before it, the bytes of every id, and the file's habits."""

    model: models.BPE
    normalizer: normalizers.Normalizer | None
    pre_tokenizer: pre_tokenizers.PreTokenizer | None
    token_bytes: list[bytes]
    add_bos: bool  # where the file does not say
    strips_prefix: bool = False  # the first space of a whole text was added, not written


def build(vocabulary: Vocabulary) -> Bpe:
    maker = _MAKERS.get(vocabulary.model)
    if maker is None:
        raise TokenizerError(
            f"tokenizer.ggml.model is '{vocabulary.model}'; supported are {', '.join(_MAKERS)}"
        )
    return maker(vocabulary)


def _byte_level(vocabulary: Vocabulary) -> Bpe:
    if vocabulary.pre is None:
        log.warning("the file has no tokenizer.ggml.pre; 'default' may cut words in wrong places")
    name = vocabulary.pre if vocabulary.pre is not None else "default"
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        supported = ", ".join(sorted(PRE_TOKENIZERS))
        raise TokenizerError(f"tokenizer.ggml.pre is '{name}'; supported are {supported}")
    ids = vocabulary.text_to_id()
    merges = [m for m in vocabulary.merges if m[0] in ids and m[1] in ids and m[0] + m[1] in ids]
    left_out = len(vocabulary.merges) - len(merges)
    if left_out:
        log.warning("left out %d merges whose parts or result are not tokens", left_out)
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in pre.patterns]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return Bpe(
        model=models.BPE(ids, merges, ignore_merges=pre.ignore_merges),
        normalizer=normalizers.NFC() if pre.nfc else None,
        pre_tokenizer=pre_tokenizers.Sequence([*splits, spell]),
        token_bytes=_unspell(vocabulary),
        add_bos=pre.add_bos,
    )


def _byte_spelling() -> dict[str, int]:
    """GPT-2's printable character for every byte, the other way round."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(itself))
    return {chr(b): b for b in itself} | {chr(0x100 + n): b for n, b in enumerate(others)}


def _unspell(vocabulary: Vocabulary) -> list[bytes]:
    spelling = _byte_spelling()

    def unspell(text: str, kind: int) -> bytes:
        if kind == UNUSED:
            return b""
        if kind in (NORMAL, BYTE):
            try:
                return bytes([spelling[char] for char in text])
            except KeyError:
                pass  # a token added without spelling: its text stands for itself
        return text.encode("utf-8", "replace")

    return [unspell(t, k) for t, k in zip(vocabulary.tokens, vocabulary.kinds, strict=True)]


def _sentencepiece(vocabulary: Vocabulary) -> Bpe:
    if not len(vocabulary.scores):
        raise TokenizerError("tokenizer.ggml.model 'llama' needs the key tokenizer.ggml.scores")
    ids = vocabulary.text_to_id()
    unknown = vocabulary.unknown_id if vocabulary.unknown_id is not None else 0
    prefix = vocabulary.add_space_prefix is not False
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefix else []
    return Bpe(
        model=models.BPE(
            ids,
            _merges_by_score(vocabulary),
            unk_token=vocabulary.tokens[unknown] or None,
            byte_fallback=True,
        ),
        normalizer=normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)]),
        pre_tokenizer=None,
        token_bytes=_unescape(vocabulary),
        add_bos=True,
        strips_prefix=prefix,
    )


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, best score of the result first.

    Control and byte tokens take no part: no text may turn into them by merging.
    """
    scores = {
        vocabulary.tokens[i]: float(vocabulary.scores[i])
        for i in reversed(vocabulary.of_kind(NORMAL, USER_DEFINED))
    }
    own = {text: text for text in scores}  # a pair holds these, not half a million copies of parts
    return [
        (left, right)
        for text in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in range(1, len(text))
        if (left := own.get(text[:cut])) and (right := own.get(text[cut:]))
    ]


def _unescape(vocabulary: Vocabulary) -> list[bytes]:
    def unescape(text: str, kind: int) -> bytes:
        if kind == BYTE:
            return _fallback_byte(text)
        if kind == UNUSED:
            return b""
        return (text.replace(SPACE, " ") if kind == NORMAL else text).encode("utf-8", "replace")

    return [unescape(t, k) for t, k in zip(vocabulary.tokens, vocabulary.kinds, strict=True)]


def _fallback_byte(text: str) -> bytes:
    """<0x0A> is the byte 10."""
    try:
        return bytes([int(text[3:5], 16)]) if text.startswith("<0x") else text.encode()
    except ValueError as error:
        raise TokenizerError(f"byte token {text!r} is not of the form <0xXX>") from error


_MAKERS: dict[str, Callable[[Vocabulary], Bpe]] = {"gpt2": _byte_level, "llama": _sentencepiece}
