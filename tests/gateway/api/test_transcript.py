import pytest
from voltapile.gateway.api.echo import FLOOR, Echo
from voltapile.gateway.api.errors import ApiError
from voltapile.gateway.api.options import Options
from voltapile.gateway.api.transcript import Transcript
from voltapile.gateway.request import Chunk

END = 257


def row(token, logprob=-0.5):
    return [(token, logprob), (token, logprob), (0, -3.0)]


def chunk(data, finish=""):
    return Chunk(list(data), finish, logprobs=[row(token) for token in data])


@pytest.fixture
def make(tokenizer):
    def start(*stop, logprobs=2):
        return Transcript(tokenizer, Options(max_tokens=None, stop=list(stop), logprobs=logprobs))

    return start


def names(piece):
    return b"".join(entry.token for entry in piece.logprobs)


def test_each_token_has_one_entry(make):
    piece = make().push(chunk(b"ab"))
    assert piece.text == "ab"
    assert [(e.token, e.logprob, e.offset) for e in piece.logprobs] == [
        (b"a", -0.5, 0),
        (b"b", -0.5, 1),
    ]
    assert piece.logprobs[0].top == [(b"a", -0.5), (b"\0", -3.0)]


def test_entries_of_a_character_come_with_it(make):
    transcript = make()
    pieces = [transcript.push(chunk([byte])) for byte in "é😀!".encode()]
    assert [p.text for p in pieces] == ["", "é", "", "", "", "😀", "!"]
    assert [len(p.logprobs) for p in pieces] == [0, 2, 0, 0, 0, 4, 1]
    assert [e.offset for p in pieces for e in p.logprobs] == [0, 0, 1, 1, 1, 1, 2]


def test_half_a_character_at_the_end_loses_nothing(make):
    transcript = make()
    first = transcript.push(chunk("a😀".encode()[:3]))
    last = transcript.push(Chunk([END], "stop", logprobs=[row(END)]))
    assert (first.text, names(first)) == ("a", b"a")
    assert (last.text, names(last)) == ("\ufffd", "😀".encode()[:2])
    assert last.tokens == [END]


@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_entries_wait_with_the_text_before_a_possible_stop(make, size):
    data = b"one ST STOP two"
    transcript = make("STOP")
    text, entries, tokens = "", b"", 0
    for at in range(0, len(data), size):
        piece = transcript.push(chunk(data[at : at + size]))
        text, entries, tokens = (
            text + piece.text,
            entries + names(piece),
            tokens + len(piece.tokens),
        )
        assert len(entries) == len(text)
        if piece.stopped:
            break
    assert (text, entries, tokens) == ("one ST ", b"one ST ", len("one ST STOP"))


def test_what_was_held_for_a_stop_string_comes_at_the_end(make):
    transcript = make("STOP")
    first = transcript.push(chunk(b"x ST"))
    assert (first.text, names(first)) == ("x ", b"x ")
    last = transcript.push(chunk(b"O", "length"))
    assert (last.text, names(last)) == ("STO", b"STO")


def test_a_token_that_is_shown_in_part_keeps_its_entry(make, tokenizer, monkeypatch):
    texts = [b"x ST", b"OP y"]
    monkeypatch.setattr(tokenizer, "token_bytes", texts.__getitem__)
    monkeypatch.setattr(tokenizer, "join", lambda ids, **_: b"".join(texts[i] for i in ids))
    piece = make("STOP", logprobs=0).push(Chunk([0, 1], logprobs=[[(0, -0.5)], [(1, -0.5)]]))
    assert (piece.text, piece.stopped) == ("x ", True)
    assert names(piece) == b"x ST"


def test_control_tokens_have_entries_and_no_text(make):
    transcript = make()
    first = transcript.push(chunk([END, *b"a"]))
    assert (first.text, len(first.logprobs)) == ("a", 2)
    last = transcript.push(chunk([END], "length"))
    assert (last.text, len(last.logprobs)) == ("", 1)


def test_infinities_are_cut(make):
    entry = Chunk([65], logprobs=[[(65, 0.0), (66, float("-inf"))]])
    assert make().push(entry).logprobs[0].top == [(b"B", FLOOR)]


def test_missing_logprobs_are_the_engines_fault(make):
    with pytest.raises(ApiError, match="log-prob") as caught:
        make().push(Chunk([65]))
    assert caught.value.status == 500


def test_none_wanted_none_given(make):
    piece = make("zz", logprobs=-1).push(Chunk([65]))
    assert (piece.text, piece.logprobs) == ("A", [])


def test_an_echo_comes_with_all_of_its_tokens(tokenizer):
    options = Options(max_tokens=None, logprobs=1)
    ids = list("hé".encode())
    transcript = Transcript(tokenizer, options, Echo(tokenizer, ids, ids))
    first = chunk(b"x")
    first.prompt_logprobs = [[], *([(i, -0.1), (7, -0.05)] for i in ids[1:])]
    piece = transcript.push(first)
    assert piece.text == "héx"
    assert piece.tokens == [*b"x"]
    assert [(e.token, e.logprob, e.offset) for e in piece.logprobs] == [
        (b"h", None, 0),
        (b"\xc3", -0.1, 1),
        (b"\xa9", -0.1, 1),
        (b"x", -0.5, 2),
    ]
    assert piece.logprobs[1].top == [(b"\x07", -0.05)]
    piece = transcript.push(chunk([*b"y", END], "stop"))
    assert piece.text == "y"
    # The end has an entry too, so that a client can count tokens.
    assert [(e.token, e.offset) for e in piece.logprobs] == [(b"y", 3), (b"<|im_end|>", 4)]


def test_an_echo_without_its_log_probabilities_is_the_engines_fault(tokenizer):
    options = Options(max_tokens=None, logprobs=1)
    with pytest.raises(ApiError, match="log-probabilities of the prompt"):
        Transcript(tokenizer, options, Echo(tokenizer, "ab", [97, 98])).push(chunk(b"x"))
