import pytest
from voltapile.gateway.api.errors import ApiError
from voltapile.gateway.api.native_schema import native_prompts, native_request


def test_forms_of_prompts():
    assert native_prompts("a", 9) == ([["a"]], False)
    assert native_prompts([1, 2], 9) == ([[1, 2]], False)
    assert native_prompts(["a", 2], 9) == ([["a", 2]], False)
    assert native_prompts(["a", "b"], 9) == ([["a"], ["b"]], True)
    assert native_prompts([["a", 1], [2]], 9) == ([["a", 1], [2]], True)


def test_more_prompts_than_allowed():
    with pytest.raises(ApiError, match="at most"):
        native_prompts(["a"] * 257, 9)


def test_openais_logprobs_mean_nothing_here():
    assert native_request(b'{"prompt": "a", "logprobs": true}', 9).options.logprobs == -1
    assert native_request(b'{"prompt": "a", "n_probs": 3}', 9).options.logprobs == 3


def test_no_token_may_be_asked_for():
    assert native_request(b'{"prompt": "a", "n_predict": 0}', 9).options.max_tokens == 0
    assert native_request(b'{"prompt": "a", "n_predict": -1}', 9).options.max_tokens is None
