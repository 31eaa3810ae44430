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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"na', ""),
        ('{"name": "lo', ""),
        ('{"name": "look", "argu', ""),
        ('{"name": "lost', '{"name": "lost'),
        ('{"names', '{"names'),
    ],
)
def test_half_a_head_where_no_marker_told_of_a_call(text, shown):
    assert read(JsonCall(names={"look"}), text, is_cut=True)[1] == shown


def test_names_and_arguments_hold_no_half_characters_and_no_numbers_without_end():
    body = '{"arguments": {"a": "\\ud83d", "b": 1e400}, "name": "f"}</c>'
    assert read(JsonCall("</c>"), body)[:2] == ([], body.removesuffix("</c>"))
    [[name, arguments]], _, _ = read(JsonCall("</c>"), body.replace("1e400", "1"))
    assert (name, arguments) == ("f", '{"a":"�","b":1}')
    half = '{"name": "\\ud83d", "arguments": {}}</c>'
    assert read(JsonCall("</c>"), half)[0] == [["�", "{}"]]
