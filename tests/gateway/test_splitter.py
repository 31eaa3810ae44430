"""Whatever the pieces, the same comes out; markers never do."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from voltapile.gateway.dialects.deepseek import DEEPSEEK
from voltapile.gateway.dialects.dialect import Tool
from voltapile.gateway.dialects.functionary import FUNCTIONARY
from voltapile.gateway.dialects.gemma import FUNCTION_GEMMA, GEMMA4
from voltapile.gateway.dialects.hermes import HERMES
from voltapile.gateway.dialects.llama3 import LLAMA3
from voltapile.gateway.dialects.mistral import MISTRAL, MISTRAL_LIST
from voltapile.gateway.dialects.plain import PLAIN
from voltapile.gateway.dialects.qwen_xml import QWEN_XML
from voltapile.gateway.dialects.recognise import Reasoning
from voltapile.gateway.splitter import Splitter

THINK = Reasoning("<think>", "</think>")
TOOLS = [
    Tool("look", "", {"type": "object", "properties": {"at": {"type": "string"}}}),
    Tool("add", "", {"type": "object", "properties": {"n": {"type": "integer"}}}),
]
LOOK, ADD = ("look", {"at": 'a "b"\n</c>'}), ("add", {"n": 3})
HERMES_CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {"at": "a \\"b\\"\\n</c>"}}\n</tool_call>\n'
    '<tool_call>{"arguments": {"n": 3}, "name": "add"}</tool_call>'
)
XML_CALLS = (
    '<tool_call>\n<function=look>\n<parameter=at>\na "b"\n</c>\n</parameter>\n</function>\n'
    "</tool_call>\n<tool_call>\n<function=add>\n<parameter=n>\n3\n</parameter>\n</function>\n"
    "</tool_call>"
)
GEMMA_CALLS = (
    '<|tool_call>call:look{at:<|"|>a "b"\n</c><|"|>}<tool_call|>'
    "<|tool_call>call:add{n:3}<tool_call|>"
)
FUNCTION_CALLS = (
    '<start_function_call>call:look{at:<escape>a "b"\n</c><escape>}<end_function_call>'
    "<start_function_call>call:add{n:3}<end_function_call>"
)
JSON_CALL = '{"name": "look", "%s": {"at": "a \\"b\\"\\n</c>"}}'
ARGUMENTS = '{"at": "a \\"b\\"\\n</c>"}'
MISTRAL_CALLS = f'[TOOL_CALLS]look[ARGS]{ARGUMENTS}[TOOL_CALLS]add[CALL_ID]a1[ARGS]{{"n": 3}}'
LIST_CALLS = (
    f'[TOOL_CALLS] [{{"name": "look", "arguments": {ARGUMENTS}, "id": "abc\'d"}}, '
    '{"name": "add", "arguments": {"n": 3}}]'
)
DEEPSEEK_CALLS = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    '{"n": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
CASES = {
    "mistral": (MISTRAL, MISTRAL_CALLS, [LOOK, ADD]),
    "mistral-list": (MISTRAL_LIST, LIST_CALLS, [LOOK, ADD]),
    "deepseek": (DEEPSEEK, DEEPSEEK_CALLS, [LOOK, ADD]),
    "deepseek-plain": (DEEPSEEK, JSON_CALL % "arguments", [LOOK]),
    "functionary": (
        FUNCTIONARY,
        f'<function=look>{ARGUMENTS}</function>\n<function=add>{{"n": 3}}</function>',
        [LOOK, ADD],
    ),
    "hermes": (HERMES, HERMES_CALLS, [LOOK, ADD]),
    "xml": (QWEN_XML, XML_CALLS, [LOOK, ADD]),
    "gemma4": (GEMMA4, GEMMA_CALLS, [LOOK, ADD]),
    "function-gemma": (FUNCTION_GEMMA, FUNCTION_CALLS, [LOOK, ADD]),
    "llama3": (LLAMA3, JSON_CALL % "parameters", [LOOK]),
    "llama3-tag": (LLAMA3, "<|python_tag|>" + JSON_CALL % "parameters", [LOOK]),
    "plain": (PLAIN, JSON_CALL % "arguments", [LOOK]),
    "plain-fenced": (PLAIN, "```json\n" + JSON_CALL % "arguments" + "\n```", [LOOK]),
}


def split(splitter, pieces, is_cut=False):
    """(content, reasoning, calls), and each push's content and reasoning."""
    content = reasoning = ""
    calls, shown = [], []
    for one in [*map(splitter.push, pieces), splitter.flush(is_cut)]:
        content += one.content
        reasoning += one.reasoning
        shown.append(one.content + one.reasoning)
        for fragment in one.calls:
            if fragment.name:
                calls.append([fragment.name, ""])
            calls[-1][1] += fragment.arguments
    return content, reasoning, calls, shown


def cut(text, at):
    ends = [0, *sorted(at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def loaded(calls):
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("case", CASES)
@given(st.data())
def test_calls_come_whole_from_any_pieces(case, data):
    dialect, text, expected = CASES[case]
    text = f"<think>\nhm <tool_call>\n</think>\n\n{text}"
    at = data.draw(st.sets(st.integers(0, len(text)), max_size=12))
    content, reasoning, calls, _ = split(Splitter(dialect, TOOLS, THINK), cut(text, at))
    assert (content, reasoning) == ("", "hm <tool_call>")
    assert loaded(calls) == expected


@pytest.mark.parametrize("case", CASES)
def test_calls_come_whole_character_by_character(case):
    dialect, text, expected = CASES[case]
    splitter = Splitter(dialect, TOOLS)
    content, _, calls, _ = split(splitter, text)
    assert content == ""
    assert loaded(calls) == expected
    assert splitter.has_calls


@pytest.mark.parametrize("dialect", [HERMES, QWEN_XML, GEMMA4, LLAMA3, PLAIN, MISTRAL, DEEPSEEK])
@pytest.mark.parametrize(
    "text",
    ["Hello", " a < b", "x {y} <tool", '{"name": "other", "arguments": {}}', "a\n\n", "", "\n"],
)
def test_other_text_stays_as_it_is(dialect, text):
    for pieces in (text, [text]):
        assert split(Splitter(dialect, TOOLS, THINK), pieces)[:3] == (text, "", [])


def test_text_leaves_at_once_and_beginnings_of_markers_wait():
    splitter = Splitter(HERMES, TOOLS, THINK)
    pieces = ["Hi", " <", "b> <tool", "_call", ">", '{"name"', ': "look", "arguments": {', '"at":"']
    found = [splitter.push(piece) for piece in pieces]
    assert [each.content for each in found] == ["Hi", " ", "<b> ", "", "", "", "", ""]
    assert [f for each in found for f in each.calls] == [("look", ""), ("", "{"), ("", '"at":"')]


def test_long_strings_of_xml_calls_leave_as_they_come():
    splitter = Splitter(QWEN_XML, TOOLS)
    splitter.push("<tool_call>\n<function=look>\n<parameter=at>\n")
    assert splitter.push("line 1\nline 2").calls == [("", "line 1\\nline 2")]
    assert splitter.push("\n</para").calls == []
    assert splitter.push("graph").calls == [("", "\\n</paragraph")]


def test_reasoning_that_the_prompt_has_opened():
    content, reasoning, _, shown = split(
        Splitter(HERMES, (), THINK, is_reasoning=True),
        ["\nwhy", "\n\n", "so", "\n</think>", "\n\nYes"],
    )
    assert (content, reasoning) == ("Yes", "why\n\nso")
    assert shown[:3] == ["why", "", "\n\nso"]


def test_reasoning_marked_in_the_middle_is_text():
    text = "Write <think> to begin and </think> to end."
    assert split(Splitter(HERMES, TOOLS, THINK), [text])[:2] == (text, "")


def test_reasoning_that_never_ends():
    assert split(Splitter(HERMES, (), THINK), ["<think>\nhm </th"])[:2] == ("", "hm </th")


@pytest.mark.parametrize("case", ["hermes", "mistral", "mistral-list", "deepseek", "functionary"])
def test_one_call_only(case):
    dialect, text, expected = CASES[case]
    splitter = Splitter(dialect, TOOLS, many=False)
    content, _, calls, _ = split(splitter, text)
    assert (content, loaded(calls), splitter.is_over) == ("", expected[:1], True)


def test_nothing_comes_behind_one_call_that_is_found_at_the_end():
    """Only there it shows that the first marker opened none."""
    text = '<tool_call><tool_call>{"name": "add", "parameters": {"n": 3}} more <tool_call>'
    content, _, calls, _ = split(Splitter(HERMES, TOOLS, many=False), [text])
    assert (content, loaded(calls)) == ("", [ADD])


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {}, "name": " "}</tool_call>'),
        (MISTRAL_LIST, '[TOOL_CALLS][{"name": "", "arguments": {}}]'),
        (QWEN_XML, "<tool_call>\n<function= >\n</function>\n</tool_call>"),
    ],
)
def test_a_call_without_a_name_is_none(dialect, text):
    for pieces in (text, [text]):
        splitter = Splitter(dialect, TOOLS)
        content, _, calls, _ = split(splitter, pieces)
        assert (calls, splitter.has_calls) == ([], False)
        assert content


def test_calls_are_text_where_there_are_no_tools():
    assert split(Splitter(HERMES, (), THINK), [HERMES_CALLS])[0] == HERMES_CALLS


def test_text_around_calls():
    text = f"I look.\n{HERMES_CALLS}\nDone."
    content, _, calls, _ = split(Splitter(HERMES, TOOLS), [text])
    assert content == "I look.\nDone."
    assert loaded(calls) == [LOOK, ADD]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "look", "arguments": {"at": "x", oops}}\n</tool_call> after',
        '{"name": "look", "arguments": {"at": "x"',
        '{"name": "look", "arguments": {"at": "x',
        '{"name": "look", "arguments": {"at": "x", "b": [1, {"c": tr',
        '{"name": "look", "arguments": {"at": "x", "b": -',
        '{"name": "look", "arguments": {"at": "x", "b"',
    ],
)
def test_broken_arguments_still_join_to_json(body):
    [(name, arguments)] = loaded(split(Splitter(HERMES, TOOLS), "<tool_call>" + body)[2])
    assert name == "look"
    assert arguments["at"] == "x"


def test_arguments_cut_by_the_token_limit_stay_cut():
    body = '<tool_call>{"name": "look", "arguments": {"at": "x'
    assert split(Splitter(HERMES, TOOLS), [body], is_cut=True)[2] == [["look", '{"at":"x']]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"name": "look"}', {}),
        ('{"name": "look", "arguments": ""}', {}),
        ('{"name": "look", "arguments": "{\\"at\\": \\"y\\"}"}', {"at": "y"}),
        ('{"name": "look", "arguments": null}', {}),
        ('{"name": "look", "arguments": {"at": "raw\nline"}}', {"at": "raw\nline"}),
    ],
)
def test_arguments_in_other_forms(body, expected):
    calls = split(Splitter(HERMES, TOOLS), f"<tool_call>{body}</tool_call>")[2]
    assert loaded(calls) == [("look", expected)]


def test_what_is_no_call_at_all_shows_without_its_markers():
    content, _, calls, _ = split(Splitter(HERMES, TOOLS), ["<tool_call>not JSON</tool_call>!"])
    assert (content, calls) == ("not JSON!", [])


# What opens a call and is none, then a call.
FALSE_STARTS = {
    "hermes": "<tool_call>oops</tool_call>",
    "xml": "<function=<tool_call>oops</tool_call>",
    "functionary": "<function=oops ",
    "gemma4": "<|tool_call>oops<tool_call|>",
    "mistral": "[TOOL_CALLS]oops, ",
    "mistral-list": "[TOOL_CALLS][oops]",
    "deepseek": "<｜tool▁call▁begin｜>oops ",
    "llama3-tag": "<|python_tag|>oops",
}


@pytest.mark.parametrize("case", FALSE_STARTS)
@settings(max_examples=20)
@given(st.data())
def test_a_call_behind_one_that_was_none(case, data):
    dialect, text, expected = CASES[case]
    text = FALSE_STARTS[case] + text
    at = data.draw(st.sets(st.integers(0, len(text)), max_size=5))
    content, _, calls, _ = split(Splitter(dialect, TOOLS), cut(text, at))
    assert loaded(calls) == expected
    assert "oops" in content
    assert not any(mark in content for mark in dialect.marks)


@pytest.mark.parametrize("text", ['```json\n{"a": 1}\n```', "```json\n", "{", '{"a"} {"b"}'])
def test_json_that_is_no_call_stays_as_it_is(text):
    for pieces in (text, [text]):
        assert split(Splitter(PLAIN, TOOLS), pieces)[:3] == (text, "", [])


def test_an_answer_that_breaks_off_makes_up_no_arguments():
    body = '<tool_call>{"name": "look", "arguments": {"at": "x", "b'
    for end in ("", 'c"', 'c":', 'c": '):
        assert loaded(split(Splitter(HERMES, TOOLS), body + end)[2]) == [("look", {"at": "x"})]


@pytest.mark.parametrize("case", ["xml", "gemma4", "functionary", "deepseek", "plain", "llama3"])
def test_a_call_that_is_cut_before_its_name_shows_nothing(case):
    dialect, text, _ = CASES[case]
    head = text[: text.index("look") + 2]
    assert split(Splitter(dialect, TOOLS), [head], is_cut=True)[:3] == ("", "", [])
