import pytest
from voltapile.gateway.api.echo import FLOOR, Echo
from voltapile.gateway.api.errors import ApiError
from voltapile.gateway.tokenizer import Tokenizer

SPACE = "\u2581"
TEXTS = ["<unk>", "<s>", "</s>", f"{SPACE}a", "b", SPACE, "a"]


@pytest.fixture
def sentencepiece():
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": TEXTS,
            "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1],
            "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.add_eos_token": True,
        }
    )


def rows(ids):
    return [[], *([(i, -1.0)] for i in ids[1:])]


def offsets(echo, ids):
    return [entry.offset for entry in echo.logprobs(rows(ids))]


def test_offsets_lead_into_the_text(tokenizer):
    text = "aé😀b"
    ids = list(text.encode())
    found = offsets(Echo(tokenizer, text, ids), ids)
    assert found == [0, 1, 1, 2, 2, 2, 2, 3]


def test_what_the_tokenizer_added_takes_no_room(sentencepiece):
    ids = sentencepiece.encode("ab")
    assert [TEXTS[i] for i in ids] == ["<s>", f"{SPACE}a", "b", "</s>"]
    echo = Echo(sentencepiece, "ab", ids)
    assert echo.text == "ab"
    assert offsets(echo, ids) == [0, 0, 1, 2]


def test_ids_show_their_names(sentencepiece):
    ids = [1, 3, 4]
    echo = Echo(sentencepiece, ids, ids)
    assert echo.text == "<s> ab"
    assert offsets(echo, ids) == [0, 3, 5]
    echo = Echo(sentencepiece, ids[1:], ids[1:])
    assert echo.text == "ab"
    assert offsets(echo, ids[1:]) == [0, 1]


def test_entries(tokenizer):
    found = Echo(tokenizer, "ab", [97, 98]).logprobs([[], [(98, -1.5), (97, float("-inf"))]])
    first, second = found
    assert (first.token, first.logprob, first.top) == (b"a", None, [])
    assert (second.token, second.logprob, second.top) == (b"b", -1.5, [(b"a", FLOOR)])


def test_rows_that_are_missing_or_too_many(tokenizer):
    echo = Echo(tokenizer, "ab", [97, 98])
    with pytest.raises(ApiError):
        echo.logprobs([[]])
    assert len(echo.logprobs([[], [(98, -1.5)], [], []])) == 2  # sent again after a restart
