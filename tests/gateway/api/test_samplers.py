"""Orders of filters that are obeyed, and those that are refused."""

import pytest
from voltapile.gateway.api.errors import ApiError
from voltapile.gateway.api.fields import Fields
from voltapile.gateway.api.options import read_options
from voltapile.gateway.api.samplers import ORDER

WARM = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05}
THEIRS = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc",
          "temperature"]  # fmt: skip


def options(**values):
    fields = Fields(values)
    return read_options(fields, default_tokens=8, logprobs=-1, vocab_size=9)


def found(**values):
    read = options(**values)
    return read.temperature, read.top_k, read.top_p, read.min_p


@pytest.mark.parametrize(
    "samplers",
    [ORDER, None, "etkpm", ["penalties", "top_k", "temperature", "top_p", "min_p", "no_such"]],
)
def test_our_order(samplers):
    assert found(samplers=samplers, **WARM) == (0.8, 40, 0.9, 0.05)


def test_what_is_left_out_is_off():
    assert found(samplers=["top_k"], **WARM) == (1.0, 40, 1.0, 0.0)
    assert found(samplers="tm", **WARM) == (0.8, 0, 1.0, 0.05)
    penalties = {"repeat_penalty": 1.5, "presence_penalty": 1, "repeat_last_n": 7}
    read = options(samplers="kt", **penalties)
    assert (read.repetition_penalty, read.presence_penalty, read.penalty_window) == (1, 0, 0)
    assert options(samplers="ekt", **penalties).repetition_penalty == 1.5


@pytest.mark.parametrize(
    "neutral", [{"temperature": 1}, {"temperature": 0}, {"top_p": 1, "min_p": 0}]
)
def test_another_order_where_it_tells_nothing(neutral):
    assert options(samplers=THEIRS, **WARM | neutral).top_k == 40


@pytest.mark.parametrize(
    ("samplers", "values"),
    [
        (THEIRS, WARM),
        (THEIRS, WARM | {"min_p": 0}),
        ("ektmp", WARM),  # min_p before top_p
        ("epkt", WARM | {"temperature": 1}),  # top_p before top_k
        ("kte", WARM),  # penalties last
        (3, {}),
        ([3], {}),
    ],
)
def test_refused(samplers, values):
    with pytest.raises(ApiError) as caught:
        options(samplers=samplers, **values)
    assert (caught.value.status, caught.value.param) == (400, "samplers")
