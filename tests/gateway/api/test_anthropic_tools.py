"""Tools and thinking as Anthropic's own client sees them."""

import itertools
import json

import anthropic
import pytest
from voltapile.gateway.request import Chunk
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
    assert len(thinking.signature) > 40, "clients drop thoughts without one"
    assert text.text == "Yes"
    assert message.stop_reason == "end_turn"
    assert prompt(engine).endswith("<think>\n")


@pytest.mark.parametrize("answer", [streamed, whole])
async def test_what_comes_at_once_stays_apart(api, engine, answer):
    """The end of a call, words and another call in one chunk: each in a block of its own."""
    first, second = CALL.split('"é"')
    engine.script = [
        Chunk([*f"A{first}".encode()]),
        Chunk([*f'"é"{second}\nB{CALL}'.encode()]),
        Chunk([257], finish="stop"),
    ]
    message = await answer(api, tools=[TOOL])
    blocks = message.content
    calls = [block.input for block in blocks if block.type == "tool_use"]
    assert calls == [{"at": "é"}] * 2
    assert "".join(block.text for block in blocks if block.type == "text") == "AB"


async def test_the_order_of_events(serve, engine):
    client = await serve()
    engine.say(f"hm\n</think>\n\nYes{CALL}")
    body = ASKED | {"tools": [TOOL], "thinking": THINKING, "stream": True}
    async with client.post("/v1/messages", json=body) as response:
        events = [json.loads(line[6:]) async for line in response.content if line[:5] == b"data:"]
    kinds = [event.get("delta", event).get("type", event["type"]) for event in events]
    runs = [kind for kind, _ in itertools.groupby(kinds)]
    blocks = (("thinking_delta", "signature_delta"), ("text_delta",), ("input_json_delta",))
    inside = [("content_block_start", *deltas, "content_block_stop") for deltas in blocks]
    expected = ["message_start", *itertools.chain(*inside), "message_delta", "message_stop"]
    assert runs == expected
    indexes = [event["index"] for event in events if "index" in event]
    assert indexes == sorted(indexes)


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


async def test_pings_while_a_call_is_held_back(serve, engine):
    """Nothing shows of what may become a marker; silence is counted from the last event."""
    client = await serve(keepalive_seconds=0.05)
    engine.say("Well <tool_")
    engine.script[-1:] = [0.3]
    data = CALL.removeprefix("<tool_").encode()
    engine.script += [Chunk([*data]), Chunk([257], finish="stop")]
    body = ASKED | {"tools": [TOOL], "stream": True}
    async with client.post("/v1/messages", json=body) as response:
        said = (await response.read()).decode()
    before, _, after = said.partition("event: ping\n")
    assert '"text":"l"' in before
    assert '"name":"look"' in after
    assert "tool_call" not in said
    assert '"stop_reason":"tool_use"' in after


async def test_the_shape_of_claude_codes_requests(serve, engine):
    client = await serve(api_keys=["secret"])
    engine.say(CALL)
    cache = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    header = "x-anthropic-billing-header: cc_version=2.1.15.a; cc_entrypoint=cli; cch=0f;"
    body = {
        "model": "claude-opus-4-6",
        "max_tokens": 32000,
        "stream": True,
        "temperature": 1,
        "system": [{"type": "text", "text": header}, {"type": "text", "text": "Code."} | cache],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"} | cache]},
        ],
        "tools": [TOOL | cache | {"eager_input_streaming": True}],
        "metadata": {"user_id": "user_x_account__session_y"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
    }
    headers = {
        "Authorization": "Bearer secret",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    }
    async with client.post("/v1/messages?beta=true", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        said = (await response.read()).decode()
    assert said.startswith("event: message_start\n")
    assert said.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
    assert prompt(engine).startswith("[look] <tool_call></tool_call>system:Code.;user:")
