import json

import pytest
from voltapile.gateway.dialects.json_call import JsonCall


def read(call, text, is_cut=False):
    """(calls, text, rest); the text comes by characters."""
    fragments, shown = [], ""
    for n, character in enumerate(text):
        parsed = call.push(character)
        fragments += parsed.fragments
        shown += parsed.text
        if parsed.rest is not None:
            return joined(fragments), shown, parsed.rest + text[n + 1 :]
    parsed = call.end(is_cut)
    return joined(fragments + parsed.fragments), shown + parsed.text, parsed.rest


def joined(fragments):
    calls = []
    for name, arguments in fragments:
        if name:
            calls.append([name, ""])
        calls[-1][1] += arguments
    return calls


def test_arguments_leave_as_they_come():
    call = JsonCall()
    assert call.push('{"name": "f", "arguments": {"a": "b').fragments == [
        ("f", ""),
        ("", '{"a":"b'),
    ]
    assert call.push(' c"').fragments == [("", ' c"')]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "arguments": {"a": 1}}',
        '{"type": "function", "name": "f", "parameters": {"a": 1}}',
        '{"arguments": {"a": 1}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"a\\": 1}"}',
    ],
)
def test_forms(body):
    for close, rest in (("", "!"), ("</c>", "</c>!")):
        [[name, arguments]], text, left = read(JsonCall(close), body + rest)
        assert (name, json.loads(arguments), text, left) == ("f", {"a": 1}, "", "!")


def test_a_list_of_calls():
    body = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]</c>'
    assert read(JsonCall("</c>"), body)[0] == [["f", '{"a":1}'], ["g", "{}"]]


def test_other_names_are_text_where_no_marker_told_of_a_call():
    body = '{"name": "g", "arguments": {}}'
    calls, text, rest = read(JsonCall(names={"f"}), body)
    assert (calls, text + rest) == ([], body)
    assert read(JsonCall(), body)[0] == [["g", "{}"]]


def test_half_a_head():
    """A marker told of a call: what was cut is none of the content."""
    assert read(JsonCall("</c>"), '{"name": "lo', is_cut=True) == ([], "", "")
    assert read(JsonCall("</c>"), '{"name": "lo')[1] == '{"name": "lo'
    assert read(JsonCall(names={"look"}), '{"name": "lo', is_cut=True)[1] == '{"name": "lo'
