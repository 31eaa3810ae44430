import json

import pytest
from voltapile.gateway.api.errors import ApiError
from voltapile.gateway.api.schema import chat_request, completion_request, token_ids

USER = {"role": "user", "content": "hi"}


def chat(**fields):
    return chat_request(json.dumps({"messages": [USER], **fields}).encode(), 258)


def completion(**fields):
    return completion_request(json.dumps({"prompt": "hi", **fields}).encode(), 258)


def refused(build, **fields):
    with pytest.raises(ApiError) as caught:
        build(**fields)
    assert caught.value.status == 400
    assert caught.value.message
    return caught.value


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        {},
        ["hi"],
        [{}],
        [{"role": 5, "content": "x"}],
        [{"role": "", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": {"type": "text", "text": "x"}}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"text": "x"}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
)
def test_bad_messages_are_refused(messages):
    assert refused(chat, messages=messages).param.startswith("messages")


def test_message_contents():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "x": 1}]
    assert chat(messages=messages).messages == [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "x": 1},
    ]


def test_template_arguments():
    kwargs = chat(chat_template_kwargs={"a": 1}, reasoning_effort="low").template_kwargs
    assert kwargs == {"a": 1, "reasoning_effort": "low"}
    refused(chat, chat_template_kwargs={"messages": []})
    refused(chat, chat_template_kwargs={"self": 1})


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_forms_of_a_prompt(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([], "prompt"),
        (["a", 1], "prompt"),
        (["a", [1]], "prompt"),
        ([[1], "a"], "prompt"),
        (["a"] * 257, "prompt"),
        ([1, "a"], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([1.0], "prompt[0]"),
        ([None], "prompt[0]"),
        ([0, 257, 258], "prompt[2]"),
        ([-1], "prompt[0]"),
        ([[1], [2, 2**70]], "prompt[1][1]"),
    ],
)
def test_bad_prompts_name_the_place(prompt, param):
    assert refused(completion, prompt=prompt).param == param


def test_token_ids_say_the_range():
    with pytest.raises(ApiError, match="0 to 9"):
        token_ids([10], "tokens", 10)
