from voltapile.gateway.dialects.dialect import Tool
from voltapile.gateway.dialects.hermes import CLOSE, HERMES, OPEN

TOOLS = [Tool("look")]


def test_a_call_up_to_its_marker():
    parsed = HERMES.parser(OPEN, TOOLS).push(
        f'\n{{"name": "look", "arguments": {{"at": "{CLOSE}"}}}}\n{CLOSE} more'
    )
    assert parsed.fragments == [("look", ""), ("", f'{{"at":"{CLOSE}"}}')]
    assert (parsed.text, parsed.rest) == ("", " more")


def test_forced_calls_are_written_as_the_model_learned():
    lines = HERMES.grammar(TOOLS, True).splitlines()
    assert lines[0] == r'start: call ("\n" call)*'
    assert lines[2].startswith(r'c0: "<tool_call>\n{\"name\": \"look\"')
