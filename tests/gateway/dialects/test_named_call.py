import json

import pytest
import regex
from voltapile.gateway.dialects.named_call import NamedCall

HEAD = regex.compile(r"\s*(\w+)>\s*(?=\{)")


def read(text, close="</f>", is_cut=False):
    """(name, arguments, text, rest), the same whether it comes whole or by characters."""
    found = []
    for pieces in ([text], text):
        call, fragments, shown, rest = NamedCall(HEAD, close), [], "", None
        for n, piece in enumerate(pieces):
            parsed = call.push(piece)
            fragments += parsed.fragments
            shown += parsed.text
            if parsed.rest is not None:
                rest = parsed.rest + "".join(pieces[n + 1 :])
                break
        else:
            parsed = call.end(is_cut)
            fragments += parsed.fragments
            shown += parsed.text
        name = fragments[0].name if fragments else ""
        if not name and rest is not None:
            shown, rest = shown + rest, ""
        found.append((name, "".join(f.arguments for f in fragments), shown, rest))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ('look>{"a": [1, "}</f>"]}</f> and', " and"),
        (' look>\n{"a": [1, "}</f>"]}\n```</f>', ""),
        ('look>{"a": [1, "}</f>"]} else', " else"),
    ],
)
def test_a_call(text, rest):
    name, arguments, shown, found = read(text)
    assert (name, shown, found) == ("look", "", rest)
    assert json.loads(arguments) == {"a": [1, "}</f>"]}


def test_what_breaks_off_is_closed_and_what_is_cut_stays_cut():
    assert read('look>{"a": "x')[1] == '{"a":"x"}'
    assert read('look>{"a": "x', is_cut=True)[1] == '{"a":"x'
    name, arguments, shown, rest = read('look>{"a": 1, oops}</f>!')
    assert (name, json.loads(arguments), shown, rest) == ("look", {"a": 1}, "", "!")


def test_what_is_no_call_is_text_and_half_a_name_is_nothing():
    assert read("look at this")[2] == "look at this"
    assert read("loo")[2] == "loo"
    assert read("loo", is_cut=True) == ("", "", "", None)
