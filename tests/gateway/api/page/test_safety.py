"""What a model writes is shown and never obeyed, wherever the page shows it."""

import json

import pytest
from voltapile.gateway.api.errors import ApiError

EVIL = [
    "<img src=x onerror=pwned()>",
    "<script>pwned()</script>",
    "<svg onload=pwned()>",
    "<iframe srcdoc='<script>parent.pwned()</script>'></iframe>",
    "<style>body{display:none}</style>",
    "<a href='javascript:pwned()'>x</a>",
    "<form action=/v1/models><button>Save</button></form>",
    "<div style='position:fixed;inset:0'>x</div>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=pwned()>",
    "[x](javascript:pwned())",
    "[x](JaVaScRiPt&colon;pwned())",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "[x](#status)",
    "![x](https://example.com/?secret)",
    '![x"onerror="pwned()](https://example.com/"onerror="pwned())',
    "<x@y.z> <javascript:pwned()>",
    "`<img src=x onerror=pwned()>`",
    "```html\n<img src=x onerror=pwned()>\n<script>pwned()</script>\n```",
    '```"><img/src=x/onerror=pwned()>\ncode\n```',
    "| <img src=x onerror=pwned()> |\n|---|\n| <script>pwned()</script> |",
    "# <img src=x onerror=pwned()>",
    "[x]: javascript:pwned()\n\n[x]",
    '[x](https://example.com "\\"onmouseover=pwned() x=\\"")',
    "<b onclick=pwned()>x</b>",
    "</div></li></ol><h1 id=model>Not the model</h1>",
]
# Elements and attributes that no message may hold.
FOUND = """
[...document.querySelectorAll("#messages *")].flatMap((each) => [
    ...(/^(img|script|iframe|svg|math|style|form|object|embed|input|h1)$/i.test(each.tagName)
        ? [each.outerHTML] : []),
    ...[...each.attributes].filter(({ name, value }) => name.startsWith("on") || name === "style"
        || name === "id" || (name === "href" && !/^(https?|mailto):/.test(value)))
        .map(({ name, value }) => `${name}=${value}`),
])
"""


@pytest.fixture
async def armed(tab):
    await tab.js("window.pwned = () => { window.isPwned = true }")
    return tab


async def assert_harmless(tab, text=""):
    assert await tab.js(FOUND) == [], text
    assert not await tab.js("window.isPwned"), text
    assert not [url for url in tab.requests if "example.com" in url], text


async def test_in_answers(armed, engine):
    for text in EVIL:
        engine.say(f"Look:\n\n{text}\n\nThe end.")
        await armed.click("#new")
        await armed.until("document.querySelectorAll('.message').length === 0")
        await armed.say(text.replace("\n", " "))
        await armed.answered()
        assert "The end." in await armed.text(".assistant .content"), text
        await assert_harmless(armed, text)


async def test_html_is_shown_as_it_was_written(armed, engine):
    engine.say(f"{EVIL[0]}\n\n`{EVIL[0]}`\n\n```html\n{EVIL[1]}\n```\n\nH<sub>2</sub>O")
    await armed.say("What?")
    await armed.answered()
    blocks = await armed.js("[...document.querySelectorAll('.block')].map((b) => b.innerText)")
    assert blocks[:2] == [EVIL[0], EVIL[0]]
    assert (await armed.text(".block pre")).strip() == EVIL[1]
    assert await armed.text(".block sub") == "2"
    await armed.until("document.querySelector('.block pre .hljs-tag')")  # coloured, and as safe
    await assert_harmless(armed)


async def test_in_reasoning_calls_and_errors(armed, engine):
    evil = EVIL[0]
    arguments = json.dumps({"name": "look", "arguments": {evil: evil}})
    engine.say(f"<think>\n{evil}\n</think>\n\n<tool_call>\n{arguments}\n</tool_call>")
    tool = {"type": "function", "function": {"name": "look"}}
    body = json.dumps({"tools": [tool]})
    await armed.click("#open-settings")
    await armed.js(f"document.querySelector('#settings [name=extra]').value = {json.dumps(body)}")
    await armed.click("#settings [type=submit]")
    await armed.say(evil)
    await armed.answered()
    assert evil in await armed.text(".calls pre")
    assert evil in await armed.js("document.querySelector('.reasoning div').textContent")
    await assert_harmless(armed)
    engine.refusal = ApiError(500, evil)
    await armed.click(".assistant .buttons button:last-child")
    await armed.until("document.querySelector('.error').innerText.includes('onerror')")
    await assert_harmless(armed)


class TestTheModelsName:
    @pytest.fixture
    def plan(self, plan):
        return type(plan)(**{f: getattr(plan, f) for f in plan.__struct_fields__ if f != "alias"},
                          alias=EVIL[0])  # fmt: skip

    async def test_it_is_a_text(self, client, open_tab):
        tab = await open_tab(str(client._base_url))
        await tab.until("document.title.includes('onerror')")
        assert await tab.text("#model") == EVIL[0]
        await tab.js("location.hash = '#status'")
        await tab.until("document.querySelector('dd')?.innerText.includes('onerror')")
        assert await tab.js("document.querySelectorAll('img').length") == 0


async def test_links_open_elsewhere(armed, engine):
    engine.say("[x](https://example.com/a?b=1&c) <https://example.com>")
    await armed.say("What?")
    await armed.answered()
    links = await armed.js(
        "[...document.querySelectorAll('.assistant a')].map((a) => [a.href, a.target, a.rel])"
    )
    assert links == [
        ["https://example.com/a?b=1&c", "_blank", "noopener noreferrer"],
        ["https://example.com/", "_blank", "noopener noreferrer"],
    ]


async def test_the_policy_holds(tab):
    """Were the page to make a mistake, the browser would still refuse."""
    tries = (
        "document.body.innerHTML = '<b>x</b>'",
        "document.createElement('script').text = '1'",
        "await fetch('https://example.com/')",
    )
    for code in tries:
        name = await tab.js(f"(async () => {{ {code} }})().catch((error) => error.name)")
        assert name == "TypeError", code
    await tab.js("document.body.append(Object.assign(new Image(), {src: 'https://example.com'}))")
    await tab.until("1")
    assert tab.problems
    tab.problems.clear()
