"""Tools and thinking as Anthropic's own client sees them."""

import anthropic
import pytest
from voltapile.gateway.template import ChatTemplate

SOURCE = (
    "{% if tools %}[{{ tools | map(attribute='function') | map(attribute='name') | join(',') }}]"
    " <tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} "
    "{{ c.function.arguments | tojson }}){% endfor %};{% endfor %}"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)
TOOL = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
ASKED = {"model": "any", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
THINKING = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
def template():
    made = ChatTemplate(SOURCE)
    yield made
    made.close()


@pytest.fixture
async def api(serve):
    session = await serve()
    async with anthropic.AsyncAnthropic(
        base_url=str(session._base_url), api_key="x", max_retries=0
    ) as client:
        yield client


def prompt(engine):
    return bytes(engine.prompts[-1]).decode()


async def streamed(api, **fields):
    async with api.messages.stream(**ASKED, **fields) as stream:
        return await stream.get_final_message()


async def whole(api, **fields):
    return await api.messages.create(**ASKED, **fields)


@pytest.mark.parametrize("answer", [streamed, whole])
async def test_words_and_two_calls(api, engine, answer):
    engine.say(f"Let me see.{CALL}\n{CALL}")
    message = await answer(api, tools=[TOOL])
    text, first, second = message.content
    assert text.text == "Let me see."
    assert (first.type, first.name, first.input) == ("tool_use", "look", {"at": "é"})
    assert (second.name, second.input) == ("look", {"at": "é"})
    assert first.id.startswith("toolu_")
    assert first.id != second.id
    assert message.stop_reason == "tool_use"
    assert prompt(engine).startswith("[look]")


@pytest.mark.parametrize("answer", [streamed, whole])
async def test_thinking(api, engine, answer):
    engine.say("hm\n</think>\n\nYes")
    message = await answer(api, thinking=THINKING)
    thinking, text = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "hm")
    assert text.text == "Yes"
    assert message.stop_reason == "end_turn"
    assert prompt(engine).endswith("<think>\n")


async def test_no_thinking_where_it_is_not_asked_for(api, engine):
    await whole(api)
    assert prompt(engine).endswith("</think>\n\n")


async def test_a_call_and_its_result_come_back(api, engine):
    engine.say(CALL)
    message = await whole(api, tools=[TOOL])
    result = {"type": "tool_result", "tool_use_id": message.content[0].id, "content": "a tree"}
    turns = [
        *ASKED["messages"],
        {"role": "assistant", "content": [block.model_dump() for block in message.content]},
        {"role": "user", "content": [result]},
    ]
    await api.messages.create(**ASKED | {"messages": turns}, tools=[TOOL])
    assert 'assistant:(look {"at": "é"});tool:a tree;' in prompt(engine)


async def test_one_call_only_or_none(api, engine):
    engine.say(f"{CALL}\n{CALL}")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len((await whole(api, tools=[TOOL], tool_choice=choice)).content) == 1
    message = await whole(api, tools=[TOOL], tool_choice={"type": "none"})
    assert [block.type for block in message.content] == ["text"]


async def test_an_answer_that_is_cut_in_a_call(api, engine):
    engine.say('<tool_call>\n{"name": "look", "arguments": {"at": "xy', finish="length")
    message = await whole(api, tools=[TOOL])
    assert message.stop_reason == "max_tokens"
    assert message.content[0].name == "look"
    again = await streamed(api, tools=[TOOL])
    assert again.stop_reason == "max_tokens"


async def test_tools_count(api):
    fields = {"model": "any", "messages": ASKED["messages"]}
    bare = await api.messages.count_tokens(**fields)
    counted = await api.messages.count_tokens(**fields, tools=[TOOL])
    assert counted.input_tokens > bare.input_tokens


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "only custom tools"),
        ({"tools": [{"name": "look"}]}, r"tools\[0\].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "name"),
        ({"tools": [5]}, r"tools\[0\]"),
        ({"tools": "look"}, "'tools' must be a list"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "names 'x'"),
    ],
)
async def test_bad_tools(api, fields, what):
    with pytest.raises(anthropic.BadRequestError, match=what):
        await whole(api, extra_body=fields)
