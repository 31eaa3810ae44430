import pytest
from voltapile.gateway.fim import FAMILIES, Filler, Other
from voltapile.gateway.tokenizer import Tokenizer

QWEN, BARE = FAMILIES[0], FAMILIES[4]
BOS = 256


def tokenizer_of(*names, add_bos=False):
    """Bytes that print as themselves, and control tokens from id 256 on."""
    characters = [chr(i) if 0x21 <= i < 0x7F else chr(256 + i) for i in range(256)]
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*characters, "<s>", *names],
            "tokenizer.ggml.token_type": [1] * 256 + [3] * (1 + len(names)),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.bos_token_id": BOS,
            "tokenizer.ggml.add_bos_token": add_bos,
        }
    )


def text(tokenizer, ids):
    return tokenizer.decode(ids, special=True)


@pytest.mark.parametrize("marks", FAMILIES)
def test_families_are_known_by_their_markers(marks):
    tokenizer = tokenizer_of(*filter(None, marks))
    filler = Filler.of(tokenizer)
    expected = f"{marks.prefix}a{marks.suffix}b{marks.middle}c"
    assert text(tokenizer, filler.prompt([*b"a"], [*b"b"], [*b"c"])) == expected
    assert len(filler.ends) == len([*filter(None, marks)])


def test_most_models_fill_no_gaps():
    assert Filler.of(tokenizer_of("<|fim_prefix|>", "<|fim_suffix|>")) is None


def test_other_files_come_first():
    tokenizer = tokenizer_of(*QWEN)
    others = [Other("x.py", "X"), Other("y.py", "Y")]
    ids = Filler.of(tokenizer).prompt([*b"a"], [*b"b"], others=others, most=100)
    assert text(tokenizer, ids) == (
        "<|repo_name|>project\n<|file_sep|>x.py\nX\n<|file_sep|>y.py\nY\n"
        "<|file_sep|>filename\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )


def test_what_does_not_fit_of_them_is_cut_from_the_beginning():
    tokenizer = tokenizer_of(*filter(None, BARE), add_bos=True)
    filler = Filler.of(tokenizer)
    ids = filler.prompt([*b"a"], [*b"b"], others=[Other("x", "12345")], most=10)
    assert ids[0] == BOS
    assert len(ids) == 10
    assert text(tokenizer, ids[1:]).startswith("45\n\n")
    whole = filler.prompt([*b"a" * 20], [*b"b"], others=[Other("x", "12345")], most=10)
    assert text(tokenizer, whole[1:]).startswith(BARE.prefix + "a" * 20)


def test_a_marker_in_a_file_is_text():
    tokenizer = tokenizer_of(*QWEN)
    filler = Filler.of(tokenizer)
    ids = filler.prompt(filler.ids("<|fim_middle|>"), [])
    assert ids.count(257 + QWEN.index("<|fim_middle|>")) == 1


def test_what_there_is_no_room_for_is_not_tokenised(monkeypatch):
    tokenizer, sizes = tokenizer_of(*QWEN), []
    encode = Tokenizer.encode
    filler = Filler.of(tokenizer)

    def spied(self, text, **options):
        sizes.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", spied)
    others = [Other("far.py", "f" * 9), Other("x" * 100_000, "x" * 100_000 + "end")]
    ids = filler.prompt([97], [98], others=others, most=50)
    assert (len(ids), text(tokenizer, ids).count("end\n")) == (50, 1)
    assert "f" * 9 not in text(tokenizer, ids)
    assert max(sizes) < 1000
