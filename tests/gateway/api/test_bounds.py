"""What binds an answer whose markers are control tokens; test_structured.py has the rest."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from voltapile.gateway.api.bounds import bounds_of
from voltapile.gateway.api.reading import reading_of
from voltapile.gateway.api.schema import chat_request
from voltapile.gateway.grammar import Grammars
from voltapile.gateway.template import ChatTemplate

TOOL = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
    "description": "no [TOOL_CALLS] here"}}}  # fmt: skip
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "tool_choice": "required"}
END, CLOSE, CALLS, ARGS = 257, 259, 260, 261
NAMED = "{{ tools }}{{ messages[0].content }}[TOOL_CALLS][ARGS]"
LIST = "{{ tools }}{{ messages[0].content }}[TOOL_CALLS]"


@pytest.fixture(scope="module")
def services(make_tokenizer):
    made = make_tokenizer("<s>", "</s>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]")
    return SimpleNamespace(tokenizer=made, grammars=Grammars(made))


async def guide_of(services, source, **fields):
    template = ChatTemplate(source)
    chat = chat_request(json.dumps(BODY | fields).encode(), services.tokenizer.vocab_size)
    reading = reading_of(services.tokenizer, template, chat, "")
    template.close()
    return (await bounds_of(services, chat.options, reading)).guide


def allowed(mask):
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))


async def test_markers_that_stand_for_no_text_are_forced_as_tokens(services):
    guide = await guide_of(services, NAMED, parallel_tool_calls=False)
    assert allowed(guide.mask) == {CALLS}
    assert allowed(guide.advance([CALLS])) == {ord("f")}
    assert allowed(guide.advance(b"f")) == {ARGS}
    guide.advance([ARGS, *b'{"n":1'])
    assert END in allowed(guide.advance(b"}"))


async def test_a_list_and_one_call_more(services):
    guide = await guide_of(services, LIST)
    guide.advance([CALLS, *b'[{"name": "f", "arguments": {"n":1}}'])
    guide.advance(b', {"name": "f", "arguments": {"n":2}}')
    assert allowed(guide.advance(b"]")) == {END}


async def test_thought_comes_before_a_forced_call(services):
    guide = await guide_of(services, NAMED + "[THINK][/THINK]")
    guide.advance([258, *b"why [ TOOL"])
    assert CALLS in allowed(guide.advance([CLOSE]))
    assert allowed(guide.advance([CALLS])) == {ord("f")}


BEGIN, OPEN, SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"


@pytest.mark.parametrize("control", [(), (BEGIN, OPEN), (OPEN, BEGIN, SEPARATOR)])
async def test_markers_beyond_ascii_as_text_or_as_tokens(make_tokenizer, control):
    made = make_tokenizer("<s>", "</s>", *control)
    services = SimpleNamespace(tokenizer=made, grammars=Grammars(made))
    guide = await guide_of(services, f"{{{{ tools }}}}{{{{ messages[0].content }}}}{BEGIN}")
    for text in (BEGIN, OPEN, "function", SEPARATOR, "f\n```json\n", '{"n":1}', "\n```"):
        ids = [258 + control.index(text)] if text in control else list(text.encode())
        for token in ids:
            assert token in allowed(guide.mask)
            guide.mask = guide.advance([token])
    assert allowed(guide.mask) == {ord("<")}


async def test_an_empty_choice_stays_one(make_tokenizer):
    made = make_tokenizer("<s>", "</s>", "<tool_call>")
    services = SimpleNamespace(tokenizer=made, grammars=Grammars(made))
    source = "{{ tools }}{{ messages[0].content }}<tool_call><function=f><parameter=a>"
    schema = {"type": "object", "properties": {"a": {"enum": ["x", ""]}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    guide = await guide_of(services, source, tools=[tool])
    guide.advance([258])
    assert allowed(guide.advance(b"\n<function=f>\n<parameter=a>\n")) == {ord("x"), ord("\n")}
