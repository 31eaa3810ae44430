import pytest
from voltapile.gateway.dialects.mistral import MISTRAL, MistralCall, call_id


def read(text):
    """(fragments, text, rest) of one call; it comes by characters."""
    call, fragments, shown = MistralCall(), [], ""
    for n, character in enumerate(text):
        parsed = call.push(character)
        fragments += parsed.fragments
        shown += parsed.text
        if parsed.rest is not None:
            return fragments, shown, parsed.rest + text[n + 1 :]
    parsed = call.end(False)
    return fragments + parsed.fragments, shown + parsed.text, None


def joined(fragments):
    return fragments[0].name, "".join(each.arguments for each in fragments)


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ('f[ARGS]{"a": 1} more', " more"),
        ('f{"a": 1}', ""),
        ('f[CALL_ID]x1[ARGS]{"a": 1}', ""),
        ('[{"name": "f", "arguments": {"a": 1}}] more', " more"),
        (' [{"name": "f", "arguments": {"a": 1}, "id": "x"}]', ""),
        ('[{"name": "f", "arguments": {"a": 1}}, {"name"', '[TOOL_CALLS][{"name"'),
        ('{"name": "f", "arguments": {"a": 1}}', None),
    ],
)
def test_forms(text, rest):
    fragments, shown, found = read(text)
    assert joined(fragments) == ("f", '{"a":1}')
    assert (shown, found or "") == ("", rest or "")


def test_what_is_no_call_is_text():
    fragments, shown, rest = read("I cannot.")
    assert (fragments, shown + (rest or "")) == ([], "I cannot.")


def test_ids():
    assert call_id("abcDEF123") == "abcDEF123"
    made = call_id("toolu_01")
    assert made == call_id("toolu_01") != call_id("toolu_02")
    assert made.isalnum()
    assert len(made) == 9
    assert MISTRAL.call_id is call_id
