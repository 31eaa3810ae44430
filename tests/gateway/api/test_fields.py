import math

import pytest
from voltapile.gateway.api.errors import ApiError
from voltapile.gateway.api.fields import Fields


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"[]", "a list"),
        (b"null", "null"),
        (b"3", "a number"),
        (b'"x"', "a string"),
        (b"{", "JSON"),
    ],
)
def test_a_body_that_is_no_object_is_refused(body, found):
    with pytest.raises(ApiError, match=found) as caught:
        Fields.parse(body)
    assert caught.value.status == 400


@pytest.mark.parametrize("read", ["flag", "integer", "text", "object"])
def test_absent_and_null_mean_the_default(read):
    absent, null = getattr(Fields({}), read)("x"), getattr(Fields({"x": None}), read)("x")
    assert vars(absent) == vars(null) if read == "object" else absent == null


@pytest.mark.parametrize(
    ("read", "value"),
    [
        ("flag", 1),
        ("flag", "true"),
        ("integer", True),
        ("integer", "5"),
        ("integer", 1.5),
        ("integer", math.inf),
        ("text", 5),
        ("object", []),
        ("list", "abc"),
        ("list", None),
    ],
)
def test_wrong_types_name_the_field(read, value):
    with pytest.raises(ApiError) as caught:
        getattr(Fields({"x": value}), read)("x")
    assert (caught.value.status, caught.value.param) == (400, "x")


def test_a_whole_float_is_an_integer():
    assert Fields({"x": 1e9}).integer("x") == 10**9


@pytest.mark.parametrize("value", [True, "1", [], math.nan, math.inf, -0.1, 1.1, 10**400])
def test_numbers_out_of_range_are_refused(value):
    with pytest.raises(ApiError) as caught:
        Fields({"x": value}).number("x", 0.5, 0.0, 1.0)
    assert caught.value.param == "x"


def test_the_low_end_may_be_open():
    assert Fields({"x": 0}).number("x", 0.5, 0.0, 1.0) == 0.0
    with pytest.raises(ApiError, match="above 0"):
        Fields({"x": 0}).number("x", 0.5, 0.0, 1.0, above_low=True)
