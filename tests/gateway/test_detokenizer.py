"""However an answer is cut into pushes, its pieces are the text of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from voltapile.gateway.detokenizer import Detokenizer
from voltapile.gateway.tokenizer import Tokenizer
from voltapile.shm.gguf import Gguf


@pytest.fixture(scope="module")
def tiny(mini: Path) -> Tokenizer:
    with Gguf.open(mini / "llama/model-f16.gguf") as gguf:
        return Tokenizer.from_gguf(gguf)


def pieces(tokenizer: Tokenizer, pushes: list[list[int]], special: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, special)
    return [*map(detokenizer.push, pushes), detokenizer.flush()]


@given(
    pushes=st.lists(st.lists(st.integers(0, 669), max_size=4), max_size=12), special=st.booleans()
)
def test_random_tokens(tiny: Tokenizer, pushes: list[list[int]], special: bool) -> None:
    whole = tiny.decode([token for push in pushes for token in push], special=special)
    assert "".join(pieces(tiny, pushes, special)) == whole


@given(text=st.text(alphabet="a é中🙂👨‍👩‍👧\u0301<|im_end|>", max_size=20), size=st.integers(1, 5))
def test_real_text(tiny: Tokenizer, text: str, size: int) -> None:
    ids = tiny.encode(text)
    pushes = [ids[at : at + size] for at in range(0, len(ids), size)]
    found = pieces(tiny, pushes, True)
    assert "".join(found) == tiny.decode(ids, special=True)
    assert not any("\ufffd" in piece for piece in found)


def test_incomplete_characters_are_held_back(tiny: Tokenizer) -> None:
    ids = tiny.encode("🐙")
    assert len(ids) > 1
    detokenizer = Detokenizer(tiny)
    assert [detokenizer.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["🐙"]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_is_one_replacement(tiny: Tokenizer) -> None:
    detokenizer = Detokenizer(tiny)
    assert detokenizer.push(tiny.encode("🐙")[:-1]) == ""
    assert detokenizer.flush() == "\ufffd"
