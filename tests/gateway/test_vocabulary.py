"""What a file's keys become, and what is said about those that make no sense."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from voltapile.gateway.vocabulary import TokenizerError, Vocabulary


def metadata(**keys: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"]}
    return {f"tokenizer.ggml.{key}": value for key, value in (base | keys).items()}


def test_defaults_where_the_file_is_silent() -> None:
    read = Vocabulary.from_metadata(metadata())
    assert (read.bos_id, read.eos_id, read.eog_ids) == (None, None, frozenset())
    assert (read.add_bos, read.add_eos, read.add_space_prefix) == (None, None, None)
    assert read.kinds == [1, 1, 1]


def test_ends_of_generation_come_from_roles_and_texts() -> None:
    tokens = ["a", "<|im_end|>", "<|endoftext|>", "x", "y"]
    keys = {"eos_token_id": np.uint32(3), "fim_pad_token_id": 4, "padding_token_id": 0}
    assert Vocabulary.from_metadata(metadata(tokens=tokens, **keys)).eog_ids == {1, 2, 3, 4}


def test_struck_out_text_ends_nothing() -> None:
    tokens = ["<s>", "</s>", "<eos>"]
    html = metadata(tokens=tokens, token_type=[4, 4, 3], eos_token_id=2)
    assert Vocabulary.from_metadata(html).eog_ids == {2}
    control = metadata(tokens=tokens, token_type=[3, 3, 3], eos_token_id=2)
    assert Vocabulary.from_metadata(control).eog_ids == {1, 2}


def test_an_id_out_of_range_is_none() -> None:
    assert Vocabulary.from_metadata(metadata(bos_token_id=2**32 - 1)).bos_id is None
    assert Vocabulary.from_metadata(metadata(eos_token_id=-1)).eog_ids == frozenset()


def test_a_merge_may_begin_with_a_space() -> None:
    assert Vocabulary.from_metadata(metadata(merges=["  b", "a b"])).merges == [
        (" ", "b"),
        ("a", "b"),
    ]


def test_equal_and_empty_texts() -> None:
    keys = {"tokens": ["", "a", "b", "a", "b", ""], "token_type": [3, 1, 1, 1, 3, 4]}
    read = Vocabulary.from_metadata(metadata(**keys))
    assert read.text_to_id() == {"a": 1, "b": 4}
    assert read.of_kind(3, 4) == [4]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tokens": []}, "tokenizer.ggml.tokens is missing or empty"),
        ({"token_type": [1, 1]}, "token_type has 2 entries, tokenizer.ggml.tokens has 3"),
        ({"token_type": [1, 1, 9]}, "known kinds are 1 to 6"),
        ({"scores": [0.5]}, "scores has 1 entries"),
        ({"merges": ["a b", "ab"]}, r"merges\[1\] is 'ab'"),
        ({"merges": 7}, "ggml.merges is 7; expected an array of texts"),
        ({"tokens": np.zeros(3)}, "ggml.tokens is another array; expected an array of texts"),
        ({"token_type": 1}, "ggml.token_type is 1; expected an array of integers"),
        ({"token_type": np.full(3, np.inf)}, "token_type is another array; expected an array of"),
        ({"scores": ["x"]}, "ggml.scores is another array; expected an array of numbers"),
        ({"pre": np.zeros(1)}, "ggml.pre is another array; expected a text"),
        ({"model": 1.5}, "ggml.model is 1.5; expected a text"),
    ],
)
def test_nonsense_is_named(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(TokenizerError, match=words):
        Vocabulary.from_metadata(metadata(**keys))


def test_a_role_that_is_no_number_is_named() -> None:
    with pytest.raises(TokenizerError, match="eos_token_id is 'x'; expected an integer"):
        Vocabulary.from_metadata(metadata(eos_token_id="x"))
