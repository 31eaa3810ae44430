import json

import pytest
from voltapile.gateway.dialects.dialect import Tool
from voltapile.gateway.dialects.qwen_xml import XmlCall

TYPES = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "e": {"enum": ["1", "2"]},
    "m": {"type": ["string", "null"]},
}


def arguments(body):
    call = XmlCall([Tool("f", "", {"type": "object", "properties": TYPES})])
    parsed = [call.push(body), call.end(False)]
    return json.loads("".join(f.arguments for one in parsed for f in one.fragments))


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("s", "12", "12"),
        ("s", " two\nlines ", " two\nlines "),
        ("i", "12", 12),
        ("i", "many", "many"),
        ("i", "NaN", "NaN"),
        ("b", "True", True),
        ("b", "false", False),
        ("o", '{"a": [1]}', {"a": [1]}),
        ("n", "null", None),
        ("n", "7", 7),
        ("e", "1", "1"),
        ("m", "null", None),
        ("m", "12", "12"),
        ("unknown", "12", "12"),
    ],
)
def test_values_by_their_schema(key, text, value):
    body = f"\n<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert arguments(body) == {key: value}


@pytest.mark.parametrize(
    "body",
    [
        "<function=f>\n<parameter=s>\na\n<parameter=i>\n1\n</function></tool_call>",
        "<function=f><parameter=s>a</parameter><parameter=i>1</parameter></function></tool_call>",
        "<function=f>\n<parameter=s>\na\n</parameter>\n<parameter=i>\n1",
        "<function=f>\n<parameter=s>\na\n</parameter>\n<parameter=i>\n1\n</tool_call>",
    ],
)
def test_forgotten_ends(body):
    assert arguments(body) == {"s": "a", "i": 1}


def test_no_parameters():
    assert arguments("<function=f>\n</function>\n</tool_call>") == {}
