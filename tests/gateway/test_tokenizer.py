"""Ids equal to Hugging Face's on the golden strings; special tokens; what callers may get wrong."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from voltapile.gateway.tokenizer import Tokenizer, TokenizerError
from voltapile.shm.gguf import Gguf


def load(path: Path) -> Tokenizer:
    with Gguf.open(path) as gguf:
        return Tokenizer.from_gguf(gguf)


@pytest.fixture(scope="module")
def tiny(mini: Path) -> Tokenizer:
    return load(mini / "llama/model-f16.gguf")


def check_golden(tokenizer: Tokenizer, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        text = row["text"]
        if text is None:  # bytes that are not UTF-8: there is no string to encode
            text = bytes.fromhex(row["hex"]).decode("utf-8", "replace")
        else:
            assert tokenizer.encode(text, add_special=False) == row["hf"], repr(text)
        plain = tokenizer.encode(text, add_special=False, parse_special=False)
        if row["agree"]:
            assert plain == row["cpp_plain"], repr(text)
            assert tokenizer.decode(plain, special=True) == text
        elif row["agree"] is None:
            assert tokenizer.decode(plain) == text


def test_golden_tiny(golden: Path) -> None:
    rows = json.loads((golden / "tokenizer/tiny.json").read_text())["rows"]
    check_golden(load(golden / "llama-tied/model-f32.gguf"), rows)


@pytest.mark.model
def test_golden_smollm2(golden: Path, smollm2: Path) -> None:
    rows = json.loads((golden / "tokenizer/smollm2.json").read_text())["rows"]
    check_golden(load(smollm2), rows)


@pytest.mark.model
def test_a_long_text_is_fast_and_leaves_the_interpreter_free(smollm2: Path) -> None:
    tokenizer = load(smollm2)
    text = "The quick brown fox, 12 of them, jumps over the lazy dog's back. " * 6000
    gaps, done = [0.0], threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    ids = tokenizer.encode(text)
    seconds = time.perf_counter() - begin
    done.set()
    watcher.join()
    assert len(ids) > 100_000
    assert seconds < 3, "usually 0.1 s"
    # Holding the GIL would leave the watcher one gap as long as the call.
    assert len(gaps) > 10
    assert max(gaps) < max(0.6 * seconds, 0.05)


def test_ids_and_names(tiny: Tokenizer) -> None:
    assert tiny.vocab_size == 670
    assert (tiny.bos_id, tiny.eos_id) == (None, 654)
    assert tiny.eog_ids == {652, 654}
    assert tiny.token_bytes(654) == b"<|im_end|>"
    assert tiny.is_special(654)
    assert not tiny.is_special(0)
    assert tiny.token_bytes(0) == b"!"
    assert tiny.encode("") == []


def test_special_tokens_in_text(tiny: Tokenizer) -> None:
    text = "hi<|im_end|>"
    assert tiny.encode(text)[-1] == 654
    plain = tiny.encode(text, parse_special=False)
    assert 654 not in plain
    assert tiny.decode(plain) == text
    assert tiny.decode(tiny.encode(text)) == "hi"
    assert tiny.decode(tiny.encode(text), special=True) == text


def test_special_tokens_are_cut_out_before_normalisation(tiny: Tokenizer) -> None:
    # An accent that follows a special token must not be composed with its last character.
    assert tiny.encode("<|im_end|>\u0301e\u0301") == [654, *tiny.encode("\u0301\u00e9")]


@given(text=st.text())
def test_text_survives_the_way_there_and_back(tiny: Tokenizer, text: str) -> None:
    import unicodedata

    ids = tiny.encode(text, parse_special=False)
    assert tiny.decode(ids) == unicodedata.normalize("NFC", text)


def test_lone_surrogates_become_replacement_characters(tiny: Tokenizer) -> None:
    assert tiny.decode(tiny.encode("a\ud800b")) == "a\ufffdb"
    assert tiny.decode(tiny.encode("\ud83d\ude42")) == "🙂"


@pytest.mark.parametrize("token", [-1, 670, 2**40])
def test_ids_outside_the_vocabulary(tiny: Tokenizer, token: int) -> None:
    with pytest.raises(TokenizerError, match=f"token id {token} is outside the vocabulary of 670"):
        tiny.decode([1, token])


def small(**keys: Any) -> Tokenizer:
    base = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "<s>", "</s>", "<s><s>", "<x>"],
        "token_type": [1, 1, 3, 3, 3, 4],
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    return Tokenizer.from_metadata(
        {f"tokenizer.ggml.{key}": value for key, value in (base | keys).items()}
    )


def test_bos_and_eos_as_the_file_asks() -> None:
    assert small().encode("a") == [0]
    both = small(add_bos_token=True, add_eos_token=True)
    assert both.encode("a") == [2, 0, 3]
    assert both.encode("a", add_special=False) == [0]
    assert small(pre="llama-bpe").encode("a") == [2, 0]
    assert small(pre="llama-bpe", add_bos_token=False).encode("a") == [0]


def test_bos_comes_once_in_a_chat() -> None:
    asks = small(add_bos_token=True)
    assert asks.encode_chat("a") == [2, 0]
    assert asks.encode_chat("<s>a") == [2, 0]
    assert small().encode_chat("<s>a") == [2, 0]


def test_longest_special_token_wins_and_user_defined_ones_always_count() -> None:
    assert small().encode("<s><s><s>") == [4, 2]
    assert small().encode("a<x>b", parse_special=False) == [0, 5, 1]
    assert small().decode([0, 5, 2, 1]) == "a<x>b"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; supported are gpt2, llama"),
        ({"pre": "nonsense"}, "tokenizer.ggml.pre is 'nonsense'; supported are .*smollm"),
    ],
)
def test_unknown_vocabularies_are_named(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(TokenizerError, match=words):
        small(**keys)
