import pytest
from voltapile.gateway.dialects.dialect import (
    Tool,
    earliest,
    first_open,
    json_calls_grammar,
    json_rule,
    named_calls_grammar,
)

TOOLS = [Tool("f", "", {"type": "object"}), Tool("g", "", {"type": "object"})]


@pytest.mark.parametrize(
    ("text", "at"), [("abc", 3), ("a<t", 1), ("a<x", 3), ("<tool", 0), ("<<to", 1), ("", 0)]
)
def test_where_a_marker_may_begin(text, at):
    assert first_open(text, ("<tool>", "<th>")) == at


def test_the_first_marker_and_of_two_the_longer():
    assert earliest("x<a><ab", ("<ab", "<a>")) == (1, "<a>")
    assert earliest("<ab>", ("<a", "<ab")) == (0, "<ab")
    assert earliest("none", ("<a",)) is None


def test_a_schemas_own_switches_do_not_count():
    own = {"type": "object", "x-guidance": {"lenient": True}}
    assert "lenient" not in json_rule("a", own)


def test_grammars():
    one = json_calls_grammar(TOOLS, False, "arguments", ("<c>", "</c>"))
    assert one.splitlines()[:3] == [
        "start: call",
        "call: c0 | c1",
        'c0: "<c>{\\"name\\": \\"f\\", \\"arguments\\": " a0 "}</c>"',
    ]
    many = named_calls_grammar(TOOLS, True, "[C]", "[A]")
    assert many.splitlines()[0] == "start: call call*"
    around = named_calls_grammar(TOOLS, True, "<", ">", "</>", ("{", "}"))
    assert around.splitlines()[0] == r'start: "{" call ("\n" call)* "}"'
