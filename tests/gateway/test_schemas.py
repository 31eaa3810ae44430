import pytest
from voltapile.gateway.schemas import endless, explained

LEAF = {"type": "object", "properties": {"next": {"$ref": "#"}}}


@pytest.mark.parametrize(
    ("schema", "ref"),
    [
        ({"type": "string"}, ""),
        (LEAF, ""),
        (LEAF | {"required": ["next"]}, "#"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, "#/$defs/x"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, {}]}}}, ""),
        ({"type": "array", "items": {"$ref": "#"}}, ""),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
        ({"allOf": [{"$ref": "#"}, {}]}, "#"),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}, ""),
        ({"$ref": "https://example.com/x"}, ""),
        (True, ""),
    ],
)
def test_references_without_an_end(schema, ref):
    assert endless(schema) == ref


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ('Unimplemented keys: ["not"]', "the keyword 'not' is not supported"),
        ("failed to compile JSON schema: Invalid type: strng", "the keyword 'type': Invalid type"),
        ("Resource 'http://x/y' is not present in a registry", "the keyword '$ref': Resource"),
        (
            "at 1(2): regex parse error:\n  (a\n  ^\nerror: x\n 12 | start: a",
            "the keyword 'pattern'",
        ),
        ("Unsatisfiable schema: minimum (5) is greater", "the keyword 'minimum'"),
        ("Unsatisfiable schema: incompatible types", "the keyword 'type'"),
        ("NoExtensionBias", "no answer that it allows has an end"),
        ("something else", "something else"),
    ],
)
def test_messages_name_the_keyword_and_no_line_of_ours(message, said):
    found = explained(message)
    assert found.startswith(said)
    assert "\n" not in found
    assert "start:" not in found
