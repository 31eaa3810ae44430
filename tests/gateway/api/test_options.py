import json

import pytest
from voltapile.gateway.api.errors import ApiError
from voltapile.gateway.api.options import NEVER, UNSUPPORTED
from voltapile.gateway.api.schema import chat_request, completion_request
from voltapile.workers.protocol import MAX_LOGIT_BIAS

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
        ("top_p", -0.1),
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
        ("stream_options", {"continuous_usage_stats": 1}),
        ("n", 0),
        ("n", 17),
        ("n", True),
        ("n", "2"),
        ("best_of", 2),
        ("logprobs", 1),
        ("logprobs", "yes"),
        ("stop_token_ids", 5),
        ("documents", {}),
        ("top_logprobs", 1),
        ("top_logprobs", -1),
        ("top_logprobs", True),
        ("repetition_penalty", 0),
        ("repeat_penalty", "x"),
        ("repeat_last_n", 0),
        ("repeat_last_n", -2),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", [0]),
        ("logit_bias", 5),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"258": 1}),
        ("logit_bias", {"1" * 5000: 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": -101}),
        ("logit_bias", {"1": "5"}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {"1": None}),
        ("logit_bias", [1, 2]),
        ("logit_bias", [[1]]),
        ("logit_bias", [[1.0, 2]]),
        ("logit_bias", [[True, 2]]),
        ("logit_bias", [[1, 2]] * (MAX_LOGIT_BIAS + 1)),
    ],
)
def test_bad_values_are_refused(field, value):
    error = refused(chat, **{field: value})
    assert error.param.partition(".")[0] == field


def test_no_share_at_all_is_the_most_likely_token():
    assert 0 < chat(top_p=0).options.top_p < 1e-5


def test_tokens_that_end_an_answer():
    assert chat(stop_token_ids=[1, 2]).options.stop_ids == [1, 2]
    assert refused(chat, stop_token_ids=[1, 258]).param == "stop_token_ids[1]"


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_what_is_not_supported_is_refused_but_neutral_values_pass(field):
    for value in (None, *UNSUPPORTED[field]):
        chat(**{field: value})
    error = refused(chat, **{field: {"some": "thing"}})
    assert (error.param, error.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "value"),
    [("mirostat", 2), ("mirostat", True), ("min_tokens", False), ("tools", [{"type": "function"}])],
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


def test_penalties():
    options = chat(repetition_penalty=1.1, presence_penalty=-2, frequency_penalty=2).options
    assert (options.repetition_penalty, options.presence_penalty) == (1.1, -2.0)
    assert options.frequency_penalty == 2.0
    assert chat(repeat_penalty=1.3).options.repetition_penalty == 1.3
    assert chat(repeat_penalty=1.3, repetition_penalty=1.3).options.repetition_penalty == 1.3
    refused(chat, repeat_penalty=1.3, repetition_penalty=1.2)
    windows = [chat(repeat_last_n=n).options.penalty_window for n in (None, -1, 1, 64, 1e12)]
    assert windows == [0, 0, 1, 64, 2**31 - 1]


@pytest.mark.parametrize(
    ("value", "biases"),
    [
        ({}, {}),
        ([], {}),
        ({"0": -100, "257": 0.5}, {0: -100.0, 257: 0.5}),
        ([[3, 1], ["4", False]], {3: 1.0, 4: NEVER}),
    ],
)
def test_logit_bias(value, biases):
    assert chat(logit_bias=value).options.logit_bias == biases


def test_choices():
    assert chat().options.n == 1
    assert chat(n=16).options.n == 16
    assert completion(n=3, best_of=3).options.n == 3
    refused(completion, n=3, best_of=4)
    refused(completion, n=16, prompt=["a"] * 17)
    assert len(completion(n=16, prompt=["a"] * 16).prompts) == 16


def test_logprobs_of_a_chat():
    assert chat(logprobs=False).options.logprobs == -1
    assert chat(logprobs=True).options.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).options.logprobs == 20
    refused(chat, logprobs=True, top_logprobs=21)
    refused(chat, logprobs=False, top_logprobs=2)


def test_logprobs_of_a_completion():
    assert completion().options.logprobs == -1
    assert completion(logprobs=False).options.logprobs == -1
    assert completion(logprobs=0).options.logprobs == 0
    assert completion(logprobs=20).options.logprobs == 20
    for bad in (21, -1, True, "5", 1.5):
        assert refused(completion, logprobs=bad).param == "logprobs"
    assert completion(logprobs=1, echo=True).options.logprobs == 1


def test_no_tokens_only_with_echo():
    assert completion(max_tokens=0, echo=True).options.max_tokens == 0
    assert refused(completion, max_tokens=0).param == "max_tokens"
    assert refused(completion, max_tokens=-2, echo=True).param == "max_tokens"
    assert refused(chat, max_tokens=0, echo=True).param == "max_tokens"
