"""SentencePiece against a slow twin written from its rules; byte spellings; odd vocabularies."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from voltapile.gateway.tokenizer import Tokenizer, TokenizerError

WORDS = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "▁▁", "ca", "ba", "aa", "é"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *WORDS, "<user>"]
KINDS = [2, 3, 3, *[6] * 256, *[1] * len(WORDS), 4]
SCORES = [0.0] * 259 + [-float(n * 7 % 15) for n in range(len(WORDS))] + [0.0]


def sentencepiece(**keys: Any) -> Tokenizer:
    base = {
        "model": "llama",
        "tokens": TOKENS,
        "token_type": KINDS,
        "scores": SCORES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return Tokenizer.from_metadata(
        {f"tokenizer.ggml.{key}": value for key, value in (base | keys).items()}
    )


def slow_twin(text: str) -> list[int]:
    """Merge the neighbours with the best score, leftmost first, until none can be merged."""
    symbols = list(text.replace(" ", "▁"))
    ids = dict(zip(WORDS, range(259, 259 + len(WORDS)), strict=True))
    while True:
        pairs = [
            (-SCORES[ids[left + right]], at)
            for at, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in ids
        ]
        if not pairs:
            break
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    out: list[int] = []
    for symbol in symbols:
        known = ids.get(symbol)
        out += [known] if known is not None else [3 + byte for byte in symbol.encode()]
    return out


PLAIN = sentencepiece(add_space_prefix=False)
PREFIXED = sentencepiece()


@given(st.text(alphabet="abc é😀\n", max_size=30))
def test_sentencepiece_is_its_slow_twin(text: str) -> None:
    assert PLAIN.encode(text, add_special=False) == slow_twin(text)
    expected = slow_twin(" " + text) if text else []
    assert PREFIXED.encode(text, add_special=False) == expected
    assert PLAIN.decode(PLAIN.encode(text)) == text
    assert PREFIXED.decode(PREFIXED.encode(text)) == text


def test_sentencepiece_special_tokens() -> None:
    a = TOKENS.index("▁a")
    user = TOKENS.index("<user>")
    assert PREFIXED.encode("a<s>a<user>a") == [1, a, 1, a, user, a]
    plain = PREFIXED.encode("<s>", parse_special=False)
    assert plain == [1, *slow_twin(" <s>")]
    assert PLAIN.decode([1, user, 2]) == "<user>"
    assert sentencepiece(add_eos_token=True, add_bos_token=False).encode("a") == [a, 2]


def test_sentencepiece_without_scores_is_refused() -> None:
    with pytest.raises(TokenizerError, match=r"needs the key tokenizer\.ggml\.scores"):
        sentencepiece(scores=[])


def byte_level(tokens: list[str], merges: list[str], **keys: Any) -> Tokenizer:
    base = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": merges}
    return Tokenizer.from_metadata(
        {f"tokenizer.ggml.{key}": value for key, value in (base | keys).items()}
    )


def test_bytes_of_spelled_and_unspelled_tokens() -> None:
    kinds = [1, 1, 1, 1, 4, 5]
    made = byte_level(["Ġa", "Ċ", "ðŁ", "▁ x", "Ġ y", "[PAD5]"], [], token_type=kinds)
    found = [made.token_bytes(token) for token in range(6)]
    assert found == [b" a", b"\n", b"\xf0\x9f", "▁ x".encode(), "Ġ y".encode(), b""]


def test_ids_are_places_whatever_the_texts_are() -> None:
    made = byte_level(["", "a", "a", "b", "", "ab"], ["a b"])
    assert made.encode("ab a b") == [5, 1, 3]  # the spaces are not in this vocabulary
    assert made.decode([2, 3, 5]) == "abab"
    assert made.vocab_size == 6


def test_a_file_without_pre_is_cut_the_default_way(caplog: pytest.LogCaptureFixture) -> None:
    tokens = ["a", "1", "2", "12", "Ġ"]
    made = byte_level(tokens, ["1 2"], pre=None)
    assert "no tokenizer.ggml.pre" in caplog.text
    for text in ("a12", "1 12", "1212"):
        assert made.encode(text) == byte_level(tokens, ["1 2"], pre="default").encode(text)


def test_ignore_merges_takes_whole_words() -> None:
    tokens, merges = ["a", "b", "c", "ab", "abc"], ["a b"]
    assert byte_level(tokens, merges).encode("abc") == [3, 2]
    assert byte_level(tokens, merges, pre="llama-bpe").encode("abc") == [4]


def test_merges_of_missing_tokens_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = byte_level(["a", "b", "ab"], ["b a", "a b", "x y"])
    assert made.encode("ab") == [2]
    assert "left out 2 merges" in caplog.text
