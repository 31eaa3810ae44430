from voltapile.gateway.dialects.dialect import Tool
from voltapile.gateway.dialects.plain import UNTAUGHT

TOOL = Tool("look", "Looks.", {"type": "object"})


def test_tools_are_told_before_everything_else():
    [system, user] = UNTAUGHT.prepared([{"role": "user", "content": "hi"}], [TOOL])
    assert system["role"] == "system"
    assert (
        '{"name":"look","description":"Looks.","parameters":{"type":"object"}}' in system["content"]
    )
    assert user == {"role": "user", "content": "hi"}


def test_tools_join_a_system_message():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    [system, _] = UNTAUGHT.prepared(messages, [TOOL])
    assert system["content"].startswith("Be brief.\n\nYou can call functions.")


def test_results_in_a_row_are_one_turn():
    messages = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]
    [user] = UNTAUGHT.prepared(messages, [])
    assert user["content"] == "Result of the function: a\nResult of the function: b"


def test_calls_and_results_become_text():
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a cat"}]},
    ]
    assert UNTAUGHT.prepared(messages, []) == [
        {"role": "assistant", "content": '{"name":"look","arguments":{"at":1}}'},
        {"role": "user", "content": "Result of the function: a cat"},
    ]
