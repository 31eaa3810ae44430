"""Any JSON passes, any beginning of it can be made whole, and anything else is found out."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from voltapile.gateway.dialects.json_text import JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=40)
@given(st.dictionaries(st.text(), VALUES), st.sampled_from([None, 2]), st.booleans(), st.data())
def test_json_in_pieces(value, indent, ascii_only, data):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    at = data.draw(st.integers(0, len(text)))
    scanner = JsonScanner()
    first = scanner.feed(text[:at])
    json.loads(first + scanner.closing())
    whole = first + scanner.feed(text[at:])
    assert scanner.is_done
    assert json.loads(whole) == value


@given(st.text(alphabet='{}[]",:\\u0aeE1.-tn \n', max_size=20))
def test_whatever_comes_can_be_made_whole(text):
    scanner = JsonScanner()
    given_out = scanner.feed("{" + text)
    json.loads(given_out + scanner.closing())


@pytest.mark.parametrize(
    "text",
    ["}", "{,", '{"a"}', '{"a":1,}', "[1,]", "[,1]", '{"a":tru}', '{"a":"\\x"', "{a:1}", "[1}"],
)
def test_what_is_no_json(text):
    scanner = JsonScanner()
    scanner.feed(text)
    assert scanner.is_broken


@pytest.mark.parametrize(
    ("text", "given_out"),
    [
        (r'{"a":"\ud83d\ude00"}', r'{"a":"\ud83d\ude00"}'),
        (r'{"a":"\ud83d\ud83d\ude00"}', r'{"a":"\ufffd\ud83d\ude00"}'),
        (r'{"a":"\ud83dx"}', r'{"a":"\ufffdx"}'),
        (r'{"a":"\ud83d"}', r'{"a":"\ufffd"}'),
        (r'{"a":"\ude00"}', r'{"a":"\ufffd"}'),
        (r'{"\ud83d\n":1}', r'{"\ufffd\n":1}'),
        (r'{"a":"\ud83d', '{"a":"'),
    ],
)
def test_halves_of_surrogate_pairs(text, given_out):
    """Many clients' parsers refuse them."""
    for pieces in ([text], text):
        scanner = JsonScanner()
        assert "".join(map(scanner.feed, pieces)) == given_out


def test_it_stops_behind_the_value():
    scanner = JsonScanner()
    assert scanner.feed('{"a": [1, "b"]} and more') == '{"a":[1,"b"]}'
    assert (scanner.is_done, scanner.used) == (True, 15)
