import json

import pytest
from voltapile.gateway.api.errors import ApiError
from voltapile.gateway.api.messages_schema import messages_request


def read(messages=None, **fields):
    messages = messages or [{"role": "user", "content": "hi"}]
    body = json.dumps({"max_tokens": 5, "messages": messages, **fields}).encode()
    return messages_request(body, 256)


def texts(*parts):
    return [{"type": "text", "text": part, "cache_control": {"type": "x"}} for part in parts]


def test_a_conversation_with_tools():
    found = read(
        [
            {"role": "user", "content": texts("a", "b")},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    *texts("I look."),
                    {"type": "tool_use", "id": "t1", "name": "ls", "input": {"path": "."}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": texts("x", "y")},
                    {"type": "tool_result", "tool_use_id": "t2"},
                    *texts("now?"),
                ],
            },
        ]
    ).messages
    function = {"name": "ls", "arguments": {"path": "."}}
    assert found == [
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "x\ny"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "now?"},
    ]


@pytest.mark.parametrize(
    ("system", "text"),
    [
        ("Be brief.", "Be brief."),
        (texts("a", "b"), "a\nb"),
        ("X-Anthropic-Billing-Header: cch=1;\nBe brief.", "Be brief."),
        (texts("x-anthropic-billing-header: cch=1;", "b"), "b"),
        (
            "it is the x-anthropic-billing-header: line",
            "it is the x-anthropic-billing-header: line",
        ),
    ],
)
def test_system(system, text):
    assert read(system=system).messages[0] == {"role": "system", "content": text}


def test_nothing_of_a_system_is_none():
    assert read(system="x-anthropic-billing-header: cch=1;").messages[0]["role"] == "user"
    assert read(system=[]).messages[0]["role"] == "user"


@pytest.mark.parametrize(
    ("thinking", "on"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, True),
    ],
)
def test_thinking(thinking, on):
    assert read(thinking=thinking).template_kwargs == {"enable_thinking": on}


def test_a_document_that_is_text():
    source = {"type": "text", "media_type": "text/plain", "data": "long"}
    found = read([{"role": "user", "content": [{"type": "document", "source": source}]}])
    assert found.messages[0]["content"] == "long"


def test_parameters():
    options = read(temperature=0.5, top_k=3, stop_sequences=["x"], metadata={"user_id": "u"},
                   service_tier="auto", presence_penalty=1).options  # fmt: skip
    assert (options.temperature, options.top_k, options.stop) == (0.5, 3, ["x"])
    assert (options.max_tokens, options.presence_penalty) == (5, 0.0)


USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
CALL = {"type": "tool_use", "id": "t", "name": "ls", "input": "{}"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [CALL]}]},
            "messages[1].content[0].input",
        ),
        *(
            ({"chat_template_kwargs": {name: []}}, "chat_template_kwargs")
            for name in ("messages", "tools", "self", "add_generation_prompt")
        ),
        ({"system": 5}, "system"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"thinking": {"type": "yes"}}, "thinking.type"),
        ({"thinking": 5}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": -2}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"temperature": "warm"}, "temperature"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [5]}, "stop_sequences"),
    ],
)
def test_bad_fields(fields, param):
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param


def test_thinking_does_not_go_on_from_words():
    messages = [USER, {"role": "assistant", "content": "x"}]
    with pytest.raises(ApiError, match="last message"):
        read(messages, thinking={"type": "enabled", "budget_tokens": 1024})
