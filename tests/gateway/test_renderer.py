"""Templates that want too much end with an error, soon and in little memory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from voltapile.gateway.renderer import Renderer, TemplateError

MAX_BYTES = 768 << 20
LOOP = "{% set n = namespace(x=START) %}{% for i in range(60) %}{% set n.x = OP %}{% endfor %}"


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    yield renderer
    renderer.close()


def loop(start: str, operation: str) -> str:
    return LOOP.replace("START", start).replace("OP", operation)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{{ 'a' * 10**9 }}",
        "{{ [1] * 10**9 }}",
        "{{ 10**(10**10) }}",
        "{{ (10**(10**7))|string }}",
        loop("'abc'", "n.x ~ n.x"),
        loop("[1]", "n.x + n.x"),
        loop("[1]", "[n.x, n.x]") + "{{ n.x }}",
        loop("[1]", "[n.x, n.x]") + "{{ n.x | tojson }}",
        "{{ ('a' * 999999) | replace('a', 'b' * 999999) }}",
        "{{ range(99999) | join('a' * 999999) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ ('a b ' * 9999999) | urlize }}",
        "{{ (range(99999) | list * 99) | sort }}{{ (range(99999) | list * 99) | groupby(0) }}",
    ],
)
def test_hostile_templates(renderer: Renderer, source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.monotonic()
    with pytest.raises(TemplateError):
        renderer.render(source, {}, seconds=0.1)
    assert time.monotonic() - begin < 25  # on a busy machine
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 100, f"{grown:.0f} MiB"
    assert renderer.render("{{ x }}", {"x": "fine"}) == "fine"


def test_time_is_limited_and_the_line_told(renderer: Renderer) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}\n\n{% endfor %}{% endfor %}"
    with pytest.raises(TemplateError, match=r"^line [123]: it takes too long$"):
        renderer.render(endless, {}, seconds=0.1)
    pid = renderer.pid
    with pytest.raises(TemplateError, match=r"^it takes too long$"):  # in one operation
        renderer.render("{{ 3**(10**7) % 7 }}", {}, seconds=0.1)
    renderer.check("")
    assert renderer.pid != pid


def test_memory_is_limited(renderer: Renderer) -> None:
    with pytest.raises(TemplateError, match=r"^line 2: it takes too much memory$"):
        renderer.render("ok\n{{ x * 10**9 }}", {"x": "a"})
    renderer.check("")
    status = Path(f"/proc/{renderer.pid}/status").read_text()
    assert int(status.split("VmPeak:")[1].split()[0]) * 1024 < MAX_BYTES


def test_a_process_that_is_gone_is_replaced(renderer: Renderer) -> None:
    renderer.check("")
    os.kill(renderer.pid, signal.SIGKILL)
    renderer._process.wait()
    assert renderer.render("a", {}) == "a"


@pytest.mark.parametrize("size", [1, 1 << 22])  # it waits for the answer, or to be read
def test_a_process_that_does_not_answer_is_replaced(size: int) -> None:
    with contextlib.closing(Renderer(patience=5.0)) as renderer:
        renderer.check("")
        renderer._patience = 0.2
        os.kill(renderer.pid, signal.SIGSTOP)
        with pytest.raises(TemplateError, match="too long"):
            renderer.render("a", {"x": "y" * size})
        renderer._patience = 5.0
        assert renderer.render("a", {}) == "a"


def test_it_can_open_nothing(renderer: Renderer) -> None:
    renderer.check("")
    limits = Path(f"/proc/{renderer.pid}/limits").read_text()
    found = {line[:25].strip(): line[25:].split()[0] for line in limits.splitlines()[1:]}
    assert found["Max open files"] == "3"
    assert found["Max processes"] == found["Max file size"] == "0"
    assert len(list(Path(f"/proc/{renderer.pid}/fd").iterdir())) == 3


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'aa bb' | wordwrap(2) }}{{ [1] | pprint }}{{ 'a&lt;' | striptags }}", "aa\nbb[1]a<"),
        (r"{{ '\u00e9\N{EM DASH}' }}{{ 'é' | tojson(ensure_ascii=true) }}", 'é\u2014"\\u00e9"'),
        ("{{ lipsum(1, false) | length > 9 }}{{ strftime_now('%Y') | length }}", "True4"),
        ("{{ [3] | random }}{{ 'a b' | urlencode }}{{ {'x': 1} | xmlattr }}", '3a%20b x="1"'),
    ],
)
def test_what_is_imported_late_is_there(renderer: Renderer, source: str, text: str) -> None:
    assert renderer.render(source, {}) == text


def test_many_threads(renderer: Renderer) -> None:
    source = "{% for i in range(n) %}{{ i }},{% endfor %}"
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda n: renderer.render(source, {"n": n}), range(40)))
    assert texts == ["".join(f"{i}," for i in range(n)) for n in range(40)]


def test_large_and_odd_messages(renderer: Renderer) -> None:
    text = "é😀\ud800" * 500_000
    assert renderer.render("{{ x }}", {"x": text}, seconds=5.0) == text
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TemplateError, match="nested"):
        renderer.render("{{ x }}", {"x": deep})


def test_a_process_ends_with_its_owner() -> None:
    renderer = Renderer()
    pid = renderer.pid
    assert Path(f"/proc/{pid}").exists()
    del renderer
    assert not Path(f"/proc/{pid}").exists()


def test_a_render_is_quick(renderer: Renderer) -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}{% endfor %}"
    variables = {"messages": [{"role": "user", "content": "hello " * 50}] * 10}
    renderer.render(source, variables)
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        renderer.render(source, variables)
        times.append(time.perf_counter() - begin)
    assert sorted(times)[25] < 0.01  # 0.2 ms on a quiet machine
