"""Tools and reasoning through the real listener: what templates see, what clients get."""

import contextlib
import json

import openai
import pytest
from voltapile.gateway.api.fields import Fields
from voltapile.gateway.api.tools import tool_use
from voltapile.gateway.request import Chunk
from voltapile.gateway.template import ChatTemplate

PATH = "/v1/chat/completions"
SOURCE = (
    "{% if tools %}[{{ tools | map(attribute='function') | map(attribute='name') | join(',') }}]"
    " <tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} "
    "{{ c.function.arguments | tojson }}){% endfor %};{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n"
    "{% elif enable_thinking is defined %}<think>\n\n</think>\n\n{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'


def allowed(*names, mode="auto"):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.fixture(scope="module")
def template():
    made = ChatTemplate(SOURCE)
    yield made
    made.close()


def prompt(engine):
    return bytes(engine.prompts[-1]).decode()


async def test_a_call(post, engine):
    engine.say("Let me see. " + CALL)
    status, body = await post(PATH, BODY)
    assert status == 200
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see. "
    [call] = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "look", "arguments": '{"at":"é"}'}
    assert prompt(engine).startswith("[look]")


async def test_streamed_calls_join_to_json(events, engine):
    engine.say(f"{CALL}\n{CALL}")
    *chunks, done = await events(PATH, BODY)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert not "".join(delta.get("content") or "" for delta in deltas)
    found = {}
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        call = found.setdefault(part["index"], {"id": part.get("id"), "arguments": ""})
        call["arguments"] += part["function"]["arguments"]
    assert [json.loads(call["arguments"]) for call in found.values()] == [{"at": "é"}] * 2
    assert len({call["id"] for call in found.values()}) == 2
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_several_choices_with_calls_and_log_probabilities(events, engine):
    """Each choice counts its own calls, and has an entry for each token of its text."""
    engine.say(CALL)
    row = [(1, -9.0)]
    for chunk in engine.script:
        chunk.logprobs = [[(token, -0.5), *row] for token in chunk.tokens]
    given = {"n": 2, "logprobs": True, "top_logprobs": 1, "parallel_tool_calls": True}
    *chunks, _ = await events(PATH, BODY | given)
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        parts = [part for c in choices for part in c["delta"].get("tool_calls", ())]
        assert {part["index"] for part in parts} == {0}
        assert [part["id"] for part in parts if "id" in part] == [parts[0]["id"]]
        joined = "".join(part["function"]["arguments"] for part in parts)
        assert json.loads(joined) == {"at": "é"}
        entries = [e for c in choices for e in (c.get("logprobs") or {"content": []})["content"]]
        assert bytes(byte for e in entries for byte in e["bytes"]) == CALL.encode()
        assert choices[-1]["finish_reason"] == "tool_calls"


async def test_one_call_only(post, engine):
    engine.say(f"{CALL}\n{CALL} and more")
    _, body = await post(PATH, BODY | {"parallel_tool_calls": False})
    [choice] = body["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert engine.streams[0].cancelled.is_set()


@pytest.mark.parametrize("names", [["look"], ["add"], []])
async def test_tools_that_may_be_called_now(post, engine, names):
    """A hermes call is one whatever its name; without any tool it is text."""
    add = {"type": "function", "function": {"name": "add"}}
    engine.say(CALL)
    given = {"tools": [TOOL, add], "tool_choice": allowed(*names)}
    status, body = await post(PATH, BODY | given)
    assert status == 200
    assert ("tool_calls" in body["choices"][0]["message"]) == bool(names)
    assert prompt(engine).startswith("[look,add]") == bool(names)


async def test_a_refusal_in_earlier_messages_is_text(post, engine):
    parts = [{"type": "refusal", "refusal": "I will not."}]
    messages = [{"role": "assistant", "content": parts}, *BODY["messages"]]
    status, _ = await post(PATH, {"messages": messages})
    assert status == 200
    assert "assistant:I will not.;user:hi" in prompt(engine)


@pytest.mark.parametrize("head", ['{"name": "lo', '{"na', ""])
async def test_a_call_that_is_cut_before_its_name_shows_nothing(post, engine, head):
    engine.say(f"<tool_call>\n{head}", finish="length")
    _, body = await post(PATH, BODY)
    [choice] = body["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


async def test_no_tools_are_shown_where_none_may_be_called(post, engine):
    engine.say(CALL)
    _, body = await post(PATH, BODY | {"tool_choice": "none"})
    assert body["choices"][0]["message"]["content"] == CALL
    assert prompt(engine) == "user:hi;"


@pytest.mark.parametrize(
    ("thinks", "text"), [(True, "hm\n</think>\n\nYes"), (None, "<think>\nhm\n</think>\n\nYes")]
)
async def test_reasoning(post, engine, thinks, text):
    engine.say(text)
    _, body = await post(PATH, BODY | {"enable_thinking": thinks})
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes")
    counted = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == len("hm\n</think>") + (0 if thinks else 1)


async def test_several_tokens_in_a_chunk_count_as_each_alone(post, engine):
    text = "<think>\nhm\n</think>\n\n" + CALL
    body = BODY | {"parallel_tool_calls": False, "return_tokens": True, "logprobs": True}
    engine.script = [Chunk(list(text.encode() + b" and more"))]
    engine.script[0].logprobs = [[(token, -1.0)] for token in engine.script[0].tokens]
    _, answer = await post(PATH, body)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert bytes(choice["tokens"]).decode() == text
    assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"]
    assert answer["usage"]["completion_tokens"] == len(text.encode())
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == 1 + len("hm\n</think>")


async def test_streamed_reasoning(events, engine):
    engine.say("hm\n</think>\n\nYes")
    *chunks, _ = await events(PATH, BODY | {"enable_thinking": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [d["reasoning_content"] for d in deltas if "reasoning_content" in d] == ["h", "m"]
    assert [d["content"] for d in deltas if d.get("content")] == ["Y", "e", "s"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_earlier_reasoning_goes_to_the_template(serve, engine, name):
    with contextlib.closing(ChatTemplate("{{ messages[0].reasoning_content }}</think>")) as made:
        client = await serve(template=made)
        messages = [{"role": "assistant", "content": "Yes", name: "hm"}, *BODY["messages"]]
        async with client.post(PATH, json={"messages": messages}) as response:
            assert response.status == 200
    assert prompt(engine) == "hm</think>"


@pytest.mark.parametrize("types", [{}, {"type": None}, {"type": ["object", "null"]}])
def test_arguments_are_an_object_whatever_else_a_schema_allows(types):
    function = {"name": "f", "parameters": {"properties": {"a": {}}, **types}}
    [tool] = tool_use(Fields({"tools": [{"function": function}]})).tools
    assert tool.schema == {"properties": {"a": {}}, "type": "object"}


async def test_reasoning_left_where_it_is(post, engine):
    engine.say("hm</think>Yes")
    _, body = await post(PATH, BODY | {"enable_thinking": True, "reasoning_format": "none"})
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hm</think>Yes"}


@pytest.mark.parametrize(
    "given",
    [
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
async def test_thinking_off(post, engine, given):
    await post(PATH, BODY | given)
    assert prompt(engine).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [('{"at": 1}', '{"at": 1}'), ({"at": 1}, '{"at": 1}'), ("", "{}"), (None, "{}"), ("x", '"x"')],
)
async def test_arguments_in_earlier_messages(post, engine, arguments, shown):
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "cat"}]},
    ]
    status, _ = await post(PATH, BODY | {"messages": messages})
    assert status == 200
    assert f"(look {shown})" in prompt(engine)


@pytest.mark.parametrize("calls", [[], None])
async def test_no_calls_in_earlier_messages(post, engine, calls):
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    status, _ = await post(PATH, {"messages": [message]})
    assert status == 200
    assert prompt(engine) == "assistant:;"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]},
         "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]},
         "tools[0].function.parameters.type"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": ["null"]}}}]},
         "tools[0].function.parameters.type"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": allowed("look", mode="some")}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed("other")}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools.tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"reasoning_format": "xml"}, "reasoning_format"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": "a", "reasoning_content": 5}]},
         "messages[0].reasoning_content"),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": 5}]},
         "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]},
         "messages[0].tool_calls[0].function.name"),
        ({"messages": [{"role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
async def test_bad_input_is_named(post, given, param):
    status, body = await post(PATH, BODY | given)
    assert (status, body["error"]["param"]) == (400, param)


async def test_an_empty_name_is_not_called_one(post):
    calls = [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}]
    _, body = await post(PATH, BODY | {"messages": calls})
    assert body["error"]["message"].endswith("function.name' must be a string, not an empty one")


async def test_openai_client_streams_calls(serve, engine):
    session = await serve()
    engine.say(f"<think>\nhm\n</think>\n\n{CALL}")
    url = str(session._base_url / "v1")
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
        asked = {"model": "x", "messages": BODY["messages"], "tools": [TOOL]}
        async with client.chat.completions.stream(**asked) as stream:
            async for _ in stream:
                pass
            answer = (await stream.get_final_completion()).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.tool_calls[0].function.name == "look"
    assert json.loads(answer.message.tool_calls[0].function.arguments) == {"at": "é"}


async def test_half_a_surrogate_in_a_call_is_no_fault_of_the_server(post, engine):
    engine.say('<tool_call>{"arguments": {"at": "\\ud83d"}, "name": "look"}</tool_call>')
    status, body = await post(PATH, BODY)
    assert status == 200
    [call] = body["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"at": "\ufffd"}
