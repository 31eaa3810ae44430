"""Where text is cut, checked with the `regex` module as an independent reader of the patterns."""

from __future__ import annotations

import pytest
import regex  # type: ignore[import-untyped]
from tokenizers import Regex, pre_tokenizers
from voltapile.gateway.pretokenizers import PRE_TOKENIZERS

TEXT = "It's camelCase HTTPServer  12345 naïve\n\n  x = [1,2]; 中文 ひら é´\u0301 don'T\t\r\n end "


def cut(text: str, patterns: tuple[str, ...]) -> list[str]:
    """Matches and the gaps between them, pattern after pattern."""
    pieces = [text]
    for pattern in patterns:
        parts = []
        for piece in pieces:
            end = 0
            for match in regex.finditer(pattern, piece):
                parts += [piece[end : match.start()], match.group()]
                end = match.end()
            parts.append(piece[end:])
        pieces = [part for part in parts if part]
    return pieces


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_the_library_reads_the_patterns_as_regex_does(name: str) -> None:
    patterns = PRE_TOKENIZERS[name].patterns
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    found = [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(TEXT)]
    assert found == cut(TEXT, patterns)
    assert "".join(found) == TEXT


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("gpt-2", "a 123", ["a", " 123"]),
        ("gpt-2", "DON'T", ["DON", "'", "T"]),
        ("llama-bpe", "a 12345", ["a", " ", "123", "45"]),
        ("llama-bpe", "DON'T", ["DON", "'T"]),
        ("qwen2", "x.y 12", ["x", ".y", " ", "1", "2"]),
        ("qwen2", "e\u0301a", ["e", "\u0301a"]),
        ("qwen35", "e\u0301a", ["e\u0301a"]),
        ("gpt-4o", "camelCase's", ["camel", "Case's"]),
        ("tekken", "camelCase's", ["camel", "Case", "'s"]),
        ("deepseek-v3", "中文ab1234", ["中文", "ab", "123", "4"]),
        ("default", "a<=1234", ["a", "<=", "123", "4"]),
    ],
)
def test_pieces(name: str, text: str, pieces: list[str]) -> None:
    assert cut(text, PRE_TOKENIZERS[name].patterns) == pieces
