import pytest
from voltapile.gateway.turns import in_turns


def of(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


TALK = of(("system", "s"), ("user", "a"), ("assistant", "b"), ("system", "t"), ("user", "c"))


@pytest.mark.parametrize(
    ("late", "neighbours", "expected"),
    [
        (True, True, TALK),
        (False, True, [*TALK[:3], *of(("user", "t"), ("user", "c"))]),
        (False, False, [*TALK[:3], *of(("user", "t\n\nc"))]),
    ],
)
def test_a_system_message_in_the_middle(late, neighbours, expected):
    assert in_turns(TALK, late, neighbours) == expected
    assert TALK[3]["role"] == "system", "what is given stays as it is"


def test_system_messages_at_the_beginning_become_one():
    found = in_turns(of(("system", "a"), ("system", "b"), ("user", "c")), False, False)
    assert found == of(("system", "a\n\nb"), ("user", "c"))


def test_a_result_takes_the_words_behind_it_and_calls_stay_apart():
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    given = [call, call, *of(("tool", "r"), ("user", "x"), ("assistant", "y"))]
    expected = [call, call, *of(("tool", "r\n\nx"), ("assistant", "y"))]
    assert in_turns(given, False, False) == expected


def test_parts_stay_parts():
    part = {"type": "text", "text": "a"}
    [found] = in_turns([*of(("user", [part])), *of(("user", "b"))], False, False)
    assert found["content"] == [part, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [("a", "b", "a\n\nb"), ("a", None, "a"), (None, "b", "b"), ("", "", None), (None, None, None)],
)
def test_reasoning_of_both_stays(one, two, expected):
    given = of(("assistant", "x"), ("assistant", "y"))
    for message, thoughts in zip(given, (one, two), strict=True):
        if thoughts is not None:
            message["reasoning_content"] = thoughts
    [found] = in_turns(given, False, False)
    assert found["content"] == "x\n\ny"
    assert (found.get("reasoning_content") or None) == expected
