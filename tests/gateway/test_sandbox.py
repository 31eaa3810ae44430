"""Templates that want too much end with an error, soon and in little memory."""

from __future__ import annotations

import concurrent.futures
import resource
import time
from typing import Any

import pytest
from voltapile.gateway.sandbox import Sandbox, TemplateError

TOO_MUCH = "too long|more than|too large|not available|recursion|unsafe|No filter|not a constant"


def render(source: str, seconds: float = 0.3, **variables: Any) -> str:
    return Sandbox().compile_chat(source)(variables, seconds=seconds)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ [1] * 10**9 }}",
        "{{ 10**10**10 }}",
        "{% set n = namespace(x=9) %}{% for i in LOOP %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% set n = namespace(x='abc') %}{% for i in LOOP %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='abc') %}{% for i in LOOP %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in LOOP %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set x = 'a' * 9999999 %}{{ x }}{{ x }}",
        "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
        "{{ ('a' * 999999) | replace('a', 'b' * 999999) }}",
        "{{ ('a' * 999999).join(range(99999)) }}",
        "{{ range(99999) | join('a' * 999999) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ 'a'['ljust'](10**10) }}",
        "{{ 'a' | center(10**10) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (10**10, 1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**10) }}",
        "{{ [1] | tojson(indent=10**10) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ x.append(1) }}",
    ],
)
def test_hostile_templates(source: str) -> None:
    source = source.replace("LOOP", "range(60)")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.monotonic()
    with pytest.raises(TemplateError, match=TOO_MUCH):
        render(source, x=[])
    assert time.monotonic() - begin < 10
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 400, f"{grown:.0f} MiB"


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
    assert render(source) == text


def test_errors_say_where_and_why() -> None:
    with pytest.raises(TemplateError, match=r"^line 2: "):
        Sandbox().compile_chat("ok\n{% if %}")
    with pytest.raises(TemplateError, match="can only concatenate str"):
        render("{{ 'a' + none }}")
    with pytest.raises(TemplateError, match="cannot be compiled"):
        Sandbox().compile_chat("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")


def test_many_threads_render_at_once() -> None:
    function = Sandbox().compile_chat("{% for i in range(n) %}{{ i }},{% endfor %}")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda n: function({"n": n}), range(40)))
    assert texts == ["".join(f"{i}," for i in range(n)) for n in range(40)]
