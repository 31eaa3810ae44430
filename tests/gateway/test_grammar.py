"""What fits a grammar passes its masks, token by token, and what does not stops there."""

import contextlib
import json
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
from voltapile.gateway import grammar
from voltapile.gateway.dialects.dialect import Tool
from voltapile.gateway.dialects.gemma import FUNCTION_GEMMA, GEMMA4
from voltapile.gateway.dialects.hermes import HERMES
from voltapile.gateway.dialects.llama3 import LLAMA3
from voltapile.gateway.dialects.plain import PLAIN
from voltapile.gateway.dialects.qwen_xml import QWEN_XML
from voltapile.gateway.grammar import GrammarError, Grammars, lark_of, lark_of_regex
from voltapile.gateway.schemas import endless, explained, json_grammar
from voltapile.gateway.splitter import Splitter
from voltapile.gateway.tokenizer import Tokenizer

END = 257


@pytest.fixture(scope="module")
def grammars():
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    tokens = [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]
    tokenizer = Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*tokens, "<|im_start|>", "<|im_end|>"],
            "tokenizer.ggml.token_type": [1] * 256 + [3, 3],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": END,
        }
    )
    return Grammars(tokenizer)


def follow(guide, text):
    """The mask behind `text`; None if it does not fit."""
    mask = guide.mask
    for byte in text.encode():
        if not allows(mask, byte):
            return None
        mask = guide.advance([byte])
    return mask


def allows(mask, token):
    return bool(mask[token // 32] >> np.uint32(token % 32) & 1)


def fits(guide, text):
    mask = follow(guide, text)
    return mask is not None and allows(mask, END)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', True),
        ('{"a":1,"b":"y"}', True),
        ('{\n  "a": 1,\n  "b": "x"\n}', True),
        ('{"a": 1', False),
        ('{"a": 1.5}', False),
        ('{"b": "x"}', False),
        ('{"a": 1, "c": 2}', False),
        ("{" + "\n" * 3, False),
    ],
)
def test_a_schema(grammars, text, expected):
    assert fits(grammars.guide(json_grammar(SCHEMA)), text) == expected


def test_nothing_but_the_end_may_follow(grammars):
    mask = follow(grammars.guide(json_grammar(SCHEMA)), '{"a": 1}')
    assert [token for token in range(258) if allows(mask, token)] == [END]


def test_answers_of_one_grammar_do_not_meet(grammars):
    first = grammars.guide("start: /a+b/")
    second = first.copy()
    assert allows(first.advance(list(b"aa")), ord("b"))
    assert not allows(second.mask, ord("b"))
    assert fits(second, "ab")


def test_gbnf(grammars):
    lark = lark_of('root ::= "yes" | "no" ws\nws ::= [ ]*')
    assert fits(grammars.guide(lark), "no  ")
    assert not fits(grammars.guide(lark), "maybe")


@pytest.mark.parametrize(
    ("gbnf", "text"),
    [
        (r'root ::= "\u00e9" [\u4e00-\u4e8c]', "é一"),
        (r'root ::= "\U0001F600\\u00e9"', "😀\\u00e9"),
        (r'root ::= "\u0022\u005c" [\u005d]', '"\\]'),
        ('root ::= a\r\na ::= "x"\r\n', "x"),
        ('start: "\\u00e9"', "é"),
    ],
)
def test_characters_of_gbnf(grammars, gbnf, text):
    assert fits(grammars.guide(lark_of(gbnf)), text)


@pytest.mark.parametrize("lark", ['start: "a" start', 'start: "b" more\nmore: "a" more'])
def test_what_forces_text_without_an_end(grammars, lark):
    with pytest.raises(GrammarError, match="too long"):
        grammars.guide(lark)


def test_nobody_waits_for_the_beginning_of_a_large_grammar(grammars, monkeypatch):
    """All others would: llguidance does not let go of the GIL."""
    seen = []
    monkeypatch.setattr("voltapile.gateway.grammar._check_beginning", seen.append)
    for size in (10, 100_000):
        assert grammars.guide(json_grammar({"const": "x" * size})).mask.any()
    assert len(seen) == 1


def test_what_is_forced_is_found_while_others_go_on(grammars, monkeypatch):
    """A mask is computed without the GIL. A pattern of 17 characters was 2 s in which nobody
    else had a token."""
    seconds = {}

    class Timed:
        def __init__(self, matcher):
            self._matcher = matcher

        def __getattr__(self, name):
            def call(*given):
                began = time.thread_time()
                found = getattr(self._matcher, name)(*given)
                seconds.setdefault(name, time.thread_time() - began)
                return found

            return call

    check = grammar._check_beginning
    monkeypatch.setattr(grammar, "_check_beginning", lambda matcher: check(Timed(matcher)))
    assert allows(grammars.guide(lark_of_regex("(a{300}){300}")).mask, ord("a"))
    assert seconds["compute_ff_tokens"] < seconds["compute_bitmask"] / 2


def test_regex(grammars):
    assert fits(grammars.guide(lark_of_regex("[0-9]{2}/x")), "12/x")


@pytest.mark.parametrize("bad", ["root ::= (", 'foo ::= "a"', "root ::= bar", "\0"])
def test_broken_gbnf(grammars, bad):
    with pytest.raises(GrammarError):
        grammars.guide(lark_of(bad))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "pattern": "(a"}, "pattern"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"if": {"type": "string"}, "then": {}}, "if"),
        ({"type": "strng"}, "type"),
        ({"$ref": "#/$defs/none"}, "$ref"),
        ({"type": "string", "format": "no-such-format"}, "format"),
        ({"not": {}, "x-guidance": {"lenient": True}}, "not"),
    ],
)
def test_what_cannot_be_compiled_is_named(grammars, schema, keyword):
    schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    with pytest.raises(GrammarError) as caught:
        grammars.guide(json_grammar(schema))
    assert f"the keyword '{keyword}'" in explained(str(caught.value))


@pytest.mark.parametrize(
    ("schema", "ref"),
    [
        ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, "#/$defs/x"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "#"),
        ({"anyOf": [{"$ref": "#"}]}, "#"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, ""),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, ""),
        ({"type": "array", "items": {"$ref": "#"}}, ""),
        ({"$ref": "https://example.com/other"}, ""),
        (SCHEMA, ""),
    ],
)
def test_references_without_an_end(schema, ref):
    assert endless(schema) == ref


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"value {i} {'x' * 40}" for i in range(2000)]},
        {"anyOf": [{"type": "object", "properties": {f"k{i}": {"type": "string"}}, "required":
                    [f"k{i}"]} for i in range(500)]},
        {"type": "string", "minLength": 1_000_000},
        {"type": "array", "minItems": 1_000_000, "items": {"type": "string"}},
        {"type": "string", "pattern": "^((a|b){1,1000}c){1,1000}$"},
        {"type": "string", "pattern": "^(.*a.{30})$"},
    ],
)  # fmt: skip
def test_compiling_is_bounded(grammars, schema):
    began = time.process_time()
    with contextlib.suppress(GrammarError):
        grammars.guide(json_grammar(schema))
    assert time.process_time() - began < 5


TOOLS = [
    Tool("look", "", {"type": "object", "properties": {"at": {"type": "string"},
                                                       "n": {"type": "integer"}},
                      "required": ["at"], "additionalProperties": False}),
    Tool("stop", ""),
]  # fmt: skip
LOOK = ("look", {"at": "here", "n": 3})
CALLS = {
    HERMES: '<tool_call>\n{"name": "look", "arguments": {"at": "here", "n": 3}}\n</tool_call>',
    LLAMA3: '{"name": "look", "parameters": {"at": "here", "n": 3}}',
    PLAIN: '{"name": "look", "arguments": {"at": "here", "n": 3}}',
    QWEN_XML: "<tool_call>\n<function=look>\n<parameter=at>\nhere\n</parameter>\n<parameter=n>\n3"
    "\n</parameter>\n</function>\n</tool_call>",
    GEMMA4: '<|tool_call>call:look{"at": "here", "n": 3}<tool_call|>',
    FUNCTION_GEMMA: '<start_function_call>call:look{"at": "here", "n": 3}<end_function_call>',
}


@pytest.mark.parametrize("dialect", CALLS, ids=lambda dialect: dialect.name)
def test_forced_calls_fit_and_are_understood(grammars, dialect):
    lark = dialect.grammar(TOOLS, True)
    text = CALLS[dialect]
    assert fits(grammars.guide(lark), text)
    assert not fits(grammars.guide(lark), "Hello")
    assert not fits(grammars.guide(lark), text.replace("look", "fly"))
    splitter = Splitter(dialect, TOOLS)
    [named, *rest] = splitter.push(text).calls
    assert named.name == "look"
    assert json.loads(named.arguments + "".join(f.arguments for f in rest)) == LOOK[1]


def test_a_mask_has_a_bit_for_each_token(grammars):
    assert len(grammars.guide("start: /a/").mask) == 9


def test_answers_of_one_grammar_share_their_pace(grammars):
    lark = json_grammar(SCHEMA)
    first, second = grammars.guide(lark), grammars.guide(lark)
    assert first.pace is second.pace is first.copy().pace
    assert first.pace is not grammars.guide(json_grammar({"type": "integer"})).pace


def test_without_the_package_a_grammar_is_refused(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no wheel of it for POWER: whatever form it comes in, that is what is said."""
    monkeypatch.setattr(grammar, "_llguidance", None)
    for lark in (lark_of('root ::= "a"'), lark_of_regex("a+"), json_grammar({"type": "string"})):
        with pytest.raises(GrammarError, match="llguidance is not installed on this server"):
            grammars.guide(lark)


@pytest.fixture
def slow(grammars, monkeypatch):
    """A grammar whose compiling begins, and goes on when it is told; and how often it has begun."""
    compiled, began, may_go = grammars._compiled, threading.Semaphore(0), threading.Event()
    slow, count = 'start: "slow"', []

    def compile(lark):
        if lark == slow:
            count.append(lark)
            began.release()
            assert may_go.wait(10)
        return compiled(lark)

    monkeypatch.setattr(grammars, "_compiled", compile)
    return slow, began, may_go, count


def test_a_slow_grammar_holds_up_no_other(grammars, slow):
    """And two who ask for it have it compiled once."""
    lark, began, may_go, count = slow
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(grammars.guide, lark) for _ in range(2)]
        try:
            assert began.acquire(timeout=10)
            assert fits(pool.submit(grammars.guide, 'start: "quick"').result(5), "quick")
            assert not any(each.done() for each in asked)
        finally:
            may_go.set()
        assert all(fits(each.result(10), "slow") for each in asked)
    assert len(count) == 1


def test_who_waits_for_a_grammar_that_fails_is_told(grammars, slow, monkeypatch):
    lark, began, may_go, count = slow
    monkeypatch.setattr(grammar, "_check_beginning", Mock(side_effect=GrammarError("no")))
    monkeypatch.setattr(grammars, "_kept", OrderedDict())
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(grammars.guide, lark) for _ in range(2)]
        assert began.acquire(timeout=10)
        may_go.set()
        for each in asked:
            with pytest.raises(GrammarError, match="no"):
                each.result(10)
    monkeypatch.setattr(grammar, "_check_beginning", Mock())
    begun = len(count)
    assert fits(grammars.guide(lark), "slow")
    assert len(count) == begun + 1  # tried again


def test_no_more_are_kept_than_that(grammars, monkeypatch):
    monkeypatch.setattr(grammars, "_kept", OrderedDict())
    for n in range(grammar.KEPT + 3):
        grammars.guide(f'start: "{n}"')
    assert len(grammars._kept) == grammar.KEPT
    assert next(iter(grammars._kept)) == 'start: "3"'


def test_a_limit_is_the_grammars_fault_and_a_token_is_not(grammars):
    wide = " | ".join(f'"a" "b{n}"' for n in range(2100))  # a row of the chart holds 2,000
    with pytest.raises(GrammarError, match="max is 2000"):
        grammars.guide(f'start: ("x" | "y") ({wide})').advance(b"x")
    with pytest.raises(ValueError, match="satisfy the grammar") as caught:
        grammars.guide('start: "x" | "y"').advance(b"z")
    assert not isinstance(caught.value, GrammarError)
