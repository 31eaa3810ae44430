import json

import pytest
from voltapile.gateway.api.errors import ApiError
from voltapile.gateway.api.schema import UNSUPPORTED, chat_request, completion_request, token_ids

USER = {"role": "user", "content": "hi"}


def chat(**fields):
    return chat_request(json.dumps({"messages": [USER], **fields}).encode())


def completion(**fields):
    return completion_request(json.dumps({"prompt": "hi", **fields}).encode(), 258)


def refused(build, **fields):
    with pytest.raises(ApiError) as caught:
        build(**fields)
    assert caught.value.status == 400
    assert caught.value.message
    return caught.value


def test_defaults_are_openais():
    options = chat().options
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (1.0, 1.0, 0, 0.0)
    assert options.max_tokens is None
    assert not options.stream
    assert completion().options.max_tokens == 16


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 101),
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", "x"),
        ("max_tokens", 0),
        ("max_tokens", -2),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_completion_tokens", 0),
        ("stop", 5),
        ("stop", [1]),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 17),
        ("stop", "a" * 1001),
        ("stream", "yes"),
        ("stream_options", []),
        ("stream_options", {"include_usage": 1}),
        ("ignore_eos", 1),
        ("return_tokens", "no"),
        ("model", 5),
        ("chat_template_kwargs", []),
    ],
)
def test_bad_values_are_refused(field, value):
    error = refused(chat, **{field: value})
    assert error.param in (field, "include_usage")


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_what_is_not_supported_is_refused_but_neutral_values_pass(field):
    for value in (None, *UNSUPPORTED[field]):
        chat(**{field: value})
    error = refused(chat, **{field: {"some": "thing"}})
    assert (error.param, error.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 2), ("n", True), ("logprobs", True), ("logprobs", 0), ("tools", [{"type": "function"}])],
)
def test_near_neutral_values_are_refused(field, value):
    refused(chat, **{field: value})


def test_extras_are_accepted():
    chat(user="me", metadata={"a": "b"}, store=False, service_tier="auto", some_new_thing=[1])


def test_token_limits():
    assert chat(max_tokens=1e9).options.max_tokens == 10**9
    assert completion(max_tokens=-1).options.max_tokens is None
    assert completion(n_predict=7).options.max_tokens == 7
    assert chat(max_tokens=7, max_completion_tokens=7).options.max_tokens == 7
    refused(chat, max_tokens=7, max_completion_tokens=8)


def test_seeds():
    assert chat(seed=5).options.seed == 5
    assert chat(seed=-2).options.seed == 2**64 - 2
    assert chat(seed=-1).options.seed != chat().options.seed  # both random


def test_stops():
    assert chat(stop="a").options.stop == ["a"]
    assert chat(stop=None).options.stop == []
    assert chat(stop=["a", "b"]).options.stop == ["a", "b"]


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
