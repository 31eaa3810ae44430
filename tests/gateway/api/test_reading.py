"""Where reasoning may be and where it has begun already, by the end of the rendered prompt."""

import json
from types import SimpleNamespace

import pytest
from voltapile.gateway.api.reading import reading_of
from voltapile.gateway.api.schema import chat_request
from voltapile.gateway.dialects.hermes import HERMES
from voltapile.gateway.dialects.recognise import Reasoning

THINK = Reasoning("<think>", "</think>")
TOOL = {"type": "function", "function": {"name": "f"}}


def read(tokenizer, rendered, reasoning=THINK, **fields):
    template = SimpleNamespace(reasoning=reasoning, dialect=HERMES)
    body = {"messages": [{"role": "user", "content": "hi"}]} | fields
    chat = chat_request(json.dumps(body).encode(), tokenizer.vocab_size)
    return reading_of(tokenizer, template, chat, rendered)


@pytest.mark.parametrize(
    ("rendered", "is_open", "is_closed"),
    [
        ("user: hi\nassistant:\n", False, False),
        ("assistant:\n<think>\n", True, False),
        ("assistant:\n<think>\n\n</think>\n\n", False, True),
        ("<think>an older one</think> yes\nuser: so?\nassistant:\n", False, False),
    ],
)
def test_the_end_of_the_prompt(tokenizer, rendered, is_open, is_closed):
    reading = read(tokenizer, rendered)
    assert (reading.is_open, reading.is_closed) == (is_open, is_closed)
    assert reading.splitter().is_reasoning == is_open


def test_nothing_to_tell_apart_needs_no_splitter(tokenizer):
    assert read(tokenizer, "x", reasoning=None).splitter() is None
    assert read(tokenizer, "x", reasoning_format="none").splitter() is None
    assert read(tokenizer, "x", reasoning=None, tools=[TOOL]).splitter() is not None


def test_reasoning_left_in_the_content_is_still_known_of(tokenizer):
    """A grammar must let it come first."""
    reading = read(tokenizer, "<think>\n", reasoning_format="none")
    assert (reading.reasoning, reading.thinks, reading.is_open) == (None, THINK, True)


def test_control_tokens_that_are_markers_show(make_tokenizer):
    made = make_tokenizer("<s>", "</s>", "<think>", "<tool_call>")
    assert read(made, "x").shown == {258}
    assert read(made, "x", tools=[TOOL]).shown == {258, 259}
