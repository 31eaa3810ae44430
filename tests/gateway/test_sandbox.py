"""What templates use works, and errors say where. What they must not do is in test_renderer."""

from __future__ import annotations

from typing import Any

import pytest
from voltapile.gateway.sandbox import MAX_LENGTH, Sandbox


def answer(source: str, **variables: Any) -> tuple[str, str]:
    return Sandbox().answer(source, variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'abcab'.replace('ab', 'x') }}{{ 'aa'.replace('a', 'b', 1) }}", "xcxba"),
        ("{{ 'abab' | replace('b', 1) }}", "a1a1"),
        ("{{ ', '.join(['a', 'b']) }}{{ [1, 2] | join('-') }}", "a, b1-2"),
        ("{{ [{'a': 1}, {'a': 2}] | join(' ', attribute='a') }}", "1 2"),
        ("{{ '%s has %d' % ('x', 3) }}{{ '{:>4}|{}'.format('a', 10) }}", "x has 3   a|10"),
        ("{{ {'b': '<é>', 'a': [1]} | tojson }}", '{"b": "<é>", "a": [1]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ 1 ~ 'a' ~ none ~ (2 + 3) * 2 }}", "1aNone10"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        (
            "{% for i in range(4) if i % 2 %}{{ loop.index }}{{ i }}{% else %}none{% endfor %}",
            "1123",
        ),
        (
            "{% macro m(x, y=2) %}{{ x ~ y ~ caller() }}{% endmacro %}{% call m(1) %}{% endcall %}",
            "12",
        ),
        ("{% set t %}{% for i in range(3) %}{{ i }}{% endfor %}{% endset %}{{ t }}", "012"),
        ("{% generation %}a{{ x | default('b') }}{% endgeneration %}", "ab"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_what_templates_use_works(source: str, text: str) -> None:
    assert answer(source) == ("text", text)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("ok\n{% if %}", "line 2: Expected an expression"),
        ("a\n\n{{ 'a' + none }}", "line 3: can only concatenate str"),
        (
            "{% for x in [1] %}\n{{ x.y.z }}{% endfor %}",
            "line 2: 'int object' has no attribute 'y'",
        ),
        ("{% macro m() %}\n{{ 1 + 'a' }}{% endmacro %}\n\n{{ m() }}", "line 2: unsupported"),
        ("{{ ''.__class__.__mro__ }}", "line 1: access to attribute '__class__'"),
        ("\n{{ x.append(1) }}", "line 2: "),
        ("{{ range(10**9) }}", "line 1: Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "line 1: maximum recursion"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "maximum recursion"),
        ("{% set x = 'a' * 9999999 %}{{ x }}\n{{ x }}", f"line 2: it makes more than {MAX_LENGTH}"),
        ("\n{{ raise_exception('no such role') }}", "no such role"),
    ],
)
def test_errors_say_where_and_why(source: str, error: str) -> None:
    kind, text = answer(source, x=[])
    assert kind == "error"
    assert text.startswith(error)


def test_templates_are_kept_but_not_all() -> None:
    sandbox = Sandbox()
    for n in range(30):
        assert sandbox.answer(f"{n} {{{{ x }}}}", {"x": "y"}) == ("text", f"{n} y")
    assert len(sandbox._templates) <= 8
    assert sandbox.answer("{{", None)[0] == "error"
    assert sandbox.answer("{{ x.y.z }}", None) == ("text", "")
