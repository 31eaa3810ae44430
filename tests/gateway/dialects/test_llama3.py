from voltapile.gateway.dialects.dialect import Tool
from voltapile.gateway.dialects.llama3 import LLAMA3, TAG

TOOLS = [Tool("look")]
BODY = '{"name": "look", "parameters": {"at": 1}}'


def calls(marker, body):
    parsed = LLAMA3.parser(marker, TOOLS).push(body)
    return parsed.fragments, parsed.text, parsed.rest


def test_an_object_is_a_call_if_it_names_a_tool():
    assert calls("{", BODY[1:]) == ([("look", ""), ("", '{"at":1}')], "", "")
    other = BODY[1:].replace("look", "other")
    assert calls("{", other) == ([], other, "")


def test_behind_the_tag_any_name_is_one():
    assert calls(TAG, BODY.replace("look", "other"))[0][0] == ("other", "")


def test_one_call_at_a_time():
    assert LLAMA3.grammar(TOOLS, True) == LLAMA3.grammar(TOOLS, False)
