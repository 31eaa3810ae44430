"""/v1/responses as OpenAI's clients see it."""

import json

import openai
import pytest
import pytest_asyncio
from voltapile.gateway.request import Chunk, Refused
from voltapile.gateway.template import ChatTemplate

PATH = "/v1/responses"
SOURCE = (
    "{% if tools %}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} "
    "{{ c.function.arguments | tojson }}){% endfor %};{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n"
    "{% elif enable_thinking is defined %}<think>\n\n</think>\n\n{% endif %}"
)
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
LOOK = {"type": "function_call", "call_id": "c", "name": "look"}
SEEN = {"type": "function_call_output", "call_id": "c", "output": "cat"}


@pytest.fixture(scope="module")
def template():
    made = ChatTemplate(SOURCE)
    yield made
    made.close()


@pytest_asyncio.fixture
async def api(serve):
    session = await serve()
    url = str(session._base_url / "v1")
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
        yield client.responses


def prompt(engine):
    return bytes(engine.prompts[-1]).decode()


async def test_a_text(api, engine):
    given = {"temperature": 0.5, "max_output_tokens": 9, "metadata": {"a": "b"}}
    answer = await api.create(model="x", input="hi", instructions="Be brief.", **given)
    assert answer.output_text == "Hello"
    assert (answer.status, answer.incomplete_details) == ("completed", None)
    assert (answer.model, answer.instructions) == ("tiny/model", "Be brief.")
    assert (answer.temperature, answer.max_output_tokens, answer.metadata) == tuple(given.values())
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (25, 6)
    assert answer.usage.input_tokens_details.cached_tokens == 1
    assert prompt(engine) == "system:Be brief.;user:hi;"
    assert engine.sampling[0].max_position == 25 + 9


async def test_a_choice_of_choices(post):
    """As deep as JSON may be."""
    head, levels = b'{"type": "allowed_tools", "tools": [', 505
    choice = head * levels + b"]}" * levels
    status, body = await post(PATH, b'{"input": "hi", "tool_choice": %b}' % choice)
    assert (status, body["error"]["param"]) == (400, "tool_choice")


async def test_what_was_cut(api, engine):
    engine.say("Hel", finish="length")
    answer = await api.create(model="x", input="hi")
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output[0].status, answer.output_text) == ("incomplete", "Hel")


async def test_what_came_before_the_cut_is_complete(post, engine):
    engine.say("<think>\nhm\n</think>\n\nHel", finish="length")
    _, body = await post(PATH, {"input": "hi"})
    found = [(item["type"], item["status"]) for item in body["output"]]
    assert found == [("reasoning", "completed"), ("message", "incomplete")]


@pytest.mark.parametrize("streams", [False, True])
async def test_reasoning_words_and_calls(api, engine, streams):
    engine.say(f"<think>\nhm\n</think>\n\nI look. {CALL}\n{CALL}")
    asked = {"model": "x", "input": "hi", "tools": [TOOL]}
    if streams:
        async with api.stream(**asked) as stream:
            seen = [event.type async for event in stream]
            answer = await stream.get_final_response()
        assert seen[:2] == ["response.created", "response.in_progress"]
        assert seen[-1] == "response.completed"
        assert seen.count("response.output_item.done") == 4
    else:
        answer = await api.create(**asked)
    thought, said, *calls = answer.output
    assert thought.content[0].text == "hm"
    assert said.content[0].text == "I look. "
    assert [call.name for call in calls] == ["look", "look"]
    assert [json.loads(call.arguments) for call in calls] == [{"at": "é"}] * 2
    assert len({call.call_id for call in calls}) == 2
    assert all(item.status == "completed" for item in answer.output)


async def test_namespaces(post, engine):
    """As Codex sends them; their names may meet."""
    space = {"type": "namespace", "name": "mcp", "tools": [TOOL]}
    tools = [TOOL, space, space | {"name": "other"}]
    engine.say(CALL.replace("look", "mcp__look") + CALL)
    status, body = await post(PATH, {"input": "hi", "tools": tools})
    assert status == 200, body
    found = [(call["name"], call.get("namespace")) for call in body["output"]]
    assert found == [("look", "mcp"), ("look", None)]
    items = [LOOK | {"namespace": "mcp", "arguments": "{}"}, SEEN]
    choice = {"type": "function", "name": "look", "namespace": "other"}
    given = {"tools": tools, "tool_choice": choice}
    assert (await post(PATH, {"input": items} | given))[0] == 200
    assert "assistant:(mcp__look {});tool:cat;" in prompt(engine)


async def test_events_tell_the_same_as_the_response(client, engine):
    """Numbers without a gap, and deltas that join to what their item is."""
    engine.say(f"<think>\nhm\n</think>\n\nYes {CALL}")
    async with client.post(PATH, json={"input": "hi", "tools": [TOOL], "stream": True}) as response:
        blocks = (await response.read()).decode().rstrip().split("\n\n")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    joined = {}
    for event in events:
        if event["type"].endswith(".delta"):
            joined[event["item_id"]] = joined.get(event["item_id"], "") + event["delta"]
    output = events[-1]["response"]["output"]
    texts = [item.get("arguments") or item["content"][0]["text"] for item in output]
    assert list(joined.values()) == texts == ["hm", "Yes ", '{"at":"é"}']
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output


async def test_a_stream_that_breaks(client, engine):
    engine.script = [Chunk([72]), Chunk(finish="error", error="lost")]
    async with client.post(PATH, json={"input": "hi", "stream": True}) as response:
        text = (await response.read()).decode()
    *_, failed, error = [json.loads(line[6:]) for line in text.split("\n") if line[:5] == "data:"]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "engine_error", "message": "lost"}
    assert (error["type"], error["message"]) == ("error", "lost")


async def test_a_form_that_is_refused_late_has_its_name_here(client, post, engine):
    engine.script = [Chunk([72]), Chunk(finish="refused", error="it is too much")]
    form = {"type": "json_schema", "name": "x", "schema": {"type": "string"}}
    asked = {"input": "hi", "text": {"format": form}}
    status, body = await post(PATH, asked)
    assert (status, body["error"]["param"]) == (400, "text.format.schema")
    assert body["error"]["message"].startswith("'text.format.schema' cannot be used: ")
    async with client.post(PATH, json=asked | {"stream": True}) as response:
        text = (await response.read()).decode()
    error = json.loads(text.rstrip().rsplit("data: ", 1)[1])
    assert (error["type"], error["code"]) == ("error", "invalid_schema")
    assert error["param"] == "text.format.schema"


async def test_a_conversation(post, engine):
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be."}]},
        {"type": "message", "role": "user", "content": "hi"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm "}]},
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "I look."}]},
        LOOK | {"arguments": '{"at": 1}'},
        LOOK | {"arguments": ""},
        SEEN,
        SEEN | {"output": [{"type": "input_text", "text": "dog"}]},
    ]  # fmt: skip
    status, body = await post(PATH, {"input": items})
    assert status == 200, body
    assert prompt(engine) == (
        'system:Be.;user:hi;assistant:hm I look.(look {"at": 1})(look {});tool:cat;tool:dog;'
    )


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"reasoning": {"effort": "none"}}, ""),
        ({"tools": [TOOL], "tool_choice": "none"}, ""),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "function", "name": "look"}]}}, "<tool_call></tool_call>"),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, ""),
        ({"include": ["reasoning.encrypted_content"], "store": False}, ""),
        ({"truncation": "auto", "service_tier": "flex", "prompt_cache_key": "a", "image": {},
          "stream_options": {"include_obfuscation": False}, "max_tool_calls": 2, "n": 1,
          "background": False, "safety_identifier": "a", "context_management": [],
          "top_logprobs": 0}, ""),
        ({"max_tokens": None, "typical_p": 1, "unknown": [5]}, ""),
        ({"input": [{"role": "user", "content": []}]}, ""),
    ],
)  # fmt: skip
async def test_what_is_taken(post, engine, given, shown):
    status, body = await post(PATH, {"input": "hi"} | given)
    assert status == 200, body
    assert prompt(engine).startswith(shown + "user:")


async def test_forms(post):
    """Bound as the chat's: here only that they arrive there; and what is wrong has its name."""
    endless = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    for schema, word in (({"not": {}}, "'not'"), (endless, "$ref")):
        form = {"type": "json_schema", "name": "x", "strict": False, "schema": schema}
        status, body = await post(PATH, {"input": "hi", "text": {"format": form}})
        assert (status, body["error"]["code"]) == (400, "invalid_schema")
        assert (word in body["error"]["message"], body["error"]["param"]) == (
            True,
            "text.format.schema",
        )
        assert body["error"]["message"].startswith("'text.format.schema' cannot be used: ")


async def test_all_that_a_chat_samples_with_is_obeyed(post, engine):
    """A field of the chat that is not taken would change the answer unseen."""
    given = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repeat_penalty": 1.25,
             "repeat_last_n": 64, "logit_bias": {"65": 3}, "top_k": 7, "min_p": 0.125,
             "stop_token_ids": [66]}  # fmt: skip
    assert (await post(PATH, {"input": "hi"} | given))[0] == 200
    assert (await post("/v1/chat/completions", {"messages": [
        {"role": "user", "content": "hi"}]} | given))[0] == 200  # fmt: skip
    ours, chats = engine.sampling
    assert (ours.presence_penalty, ours.top_k, ours.logit_bias) == (1.5, 7, {65: 3.0})
    for name in ("frequency_penalty", "repetition_penalty", "penalty_window", "min_p", "stop_ids"):
        assert getattr(ours, name) == getattr(chats, name), name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_tokens": 5}, "'max_tokens' is a field of /v1/chat/completions; here it is "
                            "'max_output_tokens'"),
        ({"response_format": {"type": "json_object"}}, "here it is 'text.format'"),
        ({"reasoning_effort": "low"}, "here it is 'reasoning.effort'"),
        ({"messages": []}, "here it is 'input'"),
        ({"n": 2}, "'n' is 1 here: ask as often as you like"),
        ({"include": ["message.output_text.logprobs"]}, "/v1/chat/completions"),
        ({"logprobs": True}, "/v1/chat/completions"),
        ({"moderation": {"model": "x"}}, "nothing is moderated here"),
        ({"context_management": [{"type": "compaction"}]}, "send less as 'input'"),
        ({"prompt": {"id": "x"}}, "nothing is stored here"),
        ({"truncation": "some"}, "must be auto or disabled, not 'some'"),
        ({"service_tier": 5}, "must be a string"),
        ({"include": "x"}, "must be a list"),
        ({"stream_options": 5}, "must be an object"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "strict": 1}}},
         "'text.format.strict' must be true or false"),
        ({"typical_p": 0.5}, "'typical_p' is not supported"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp", "server_label": "x"}},
         "'tool_choice' is 'mcp'; only functions are supported"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "custom", "name": "look"}]}}, "'tool_choice' is 'custom'"),
    ],
)  # fmt: skip
async def test_what_cannot_be_obeyed_is_said(post, engine, given, said):
    status, body = await post(PATH, {"input": "hi"} | given)
    assert status == 400
    assert said in body["error"]["message"]
    assert body["error"]["param"].split(".")[0] == next(reversed(given))
    assert engine.prompts == []


async def test_every_field_of_openais_client_is_known():
    """One that comes with a new version is taken, refused or known to be of no consequence."""
    import typing

    from openai.types.responses import response_create_params
    from voltapile.gateway.api import responses_fields as known

    fields = typing.get_type_hints(response_create_params.ResponseCreateParamsBase)
    chats = {"metadata", "model", "parallel_tool_calls", "store", "temperature", "top_p", "user"}
    assert fields.keys() <= {*known.OWN, *known.REFUSED, *known.IGNORED, *chats}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [LOOK | {"name": 5}]}, "input[0].name"),
        ({"input": [LOOK | {"name": ""}]}, "input[0].name"),
        ({"input": [LOOK | {"arguments": {}}]}, "input[0].arguments"),
        ({"input": [SEEN | {"output": 5}]}, "input[0].output"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "x"}, "conversation"),
        ({"background": True}, "background"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "x"}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "", "tools": [TOOL]}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [5]}]}, "tools[0].tools[0]"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [TOOL | {"name": []}]}]},
         "tools[0].tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [TOOL, TOOL | {"name": "b"}]},
                    TOOL | {"name": "a b"}]}, "tools[1].name"),
        ({"tools": [TOOL, {"type": "namespace", "name": "a", "tools": [
            TOOL, TOOL | {"name": "b", "parameters": {"type": "string"}}]}]},
         "tools[1].tools[1].parameters.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"top_logprobs": 3}, "top_logprobs"),
    ],
)  # fmt: skip
async def test_bad_bodies(post, engine, given, param):
    status, body = await post(PATH, {"input": "hi"} | given)
    assert (status, body["error"]["param"]) == (400, param), body
    assert ".function" not in body["error"]["message"]  # which is a chat's
    assert engine.prompts == []


async def test_a_conversation_that_is_too_long_is_the_inputs_fault(post, engine):
    """Found when it is rendered, and the scheduler may find that its answer would be."""
    status, body = await post(PATH, {"input": "hi " * 5000})
    assert (status, body["error"]["param"]) == (400, "input")
    assert body["error"]["code"] == "context_length_exceeded"

    def refuse(*given, **more):
        raise Refused("ask for fewer tokens", "context_length_exceeded", "max_tokens")

    engine.submit = refuse
    status, body = await post(PATH, {"input": "hi"})
    assert (status, body["error"]["param"]) == (400, "max_output_tokens")
    assert body["error"]["message"] == "ask for fewer tokens"
