import json

import pytest
from voltapile.gateway.dialects.gemma import GemmaCall


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("{}", {}),
        (
            '{"a": "b\\n\\"c\\"", "d": [1, 2.5, true, null]}',
            {"a": 'b\n"c"', "d": [1, 2.5, True, None]},
        ),
        ('{a:<|"|>x,y}<|"|>,b:{c:[<|"|>d<|"|>]}}', {"a": "x,y}", "b": {"c": ["d"]}}),
        ("{a:-3,b:some words}", {"a": -3, "b": "some words"}),
    ],
)
def test_arguments(body, value):
    [fragment] = GemmaCall("<tool_call|>").push(f"call:f{body}<tool_call|>").fragments
    assert fragment.name == "f"
    assert json.loads(fragment.arguments) == value


@pytest.mark.parametrize(
    "body", ["call:f{a", "call:f{a:", "call", "call:f" + "{a:" * 100, 'call:f{a:"']
)
def test_what_is_no_call_is_text(body):
    parsed = GemmaCall("<tool_call|>").push(f"{body}<tool_call|>rest")
    assert (parsed.fragments, parsed.text, parsed.rest) == ([], body, "rest")
