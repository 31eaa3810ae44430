"""Keyboard, screen reader, colours: what a person without a mouse, or without sight, meets."""

import json

import pytest
from voltapile.gateway.request import Chunk

pytestmark = pytest.mark.slow


async def focused(tab):
    return await tab.js("document.activeElement.id || document.activeElement.textContent.trim()")


async def test_the_order_of_focus(tab):
    order = []
    for _ in range(9):
        await tab.press("Tab")
        order.append(await focused(tab))
    assert order == [
        "Skip to the message box", "to-chat", "to-status", "open-settings", "theme", "new",
        "scroll", "text", "send",
    ]  # fmt: skip


async def test_skip_link(tab):
    await tab.press("Tab")
    await tab.press("Enter")
    assert await focused(tab) == "text"


async def test_focus_is_seen(tab):
    await tab.press("Tab")
    await tab.press("Tab")
    style = await tab.js("getComputedStyle(document.activeElement).outlineWidth")
    assert style == "3px"


async def test_everything_has_a_name(tab, engine):
    """By the browser's own accessibility tree."""
    engine.say("A [link](https://example.com).\n\n```sh\nls\n```\n\n|a|\n|-|\n|b|")
    await tab.say("What?")
    await tab.answered()
    await tab.until("document.querySelector('.delete')")
    tree = (await tab.send("Accessibility.getFullAXTree"))["nodes"]
    roles = {"button", "link", "textbox", "combobox", "listbox", "region", "navigation", "heading"}
    shown = [node for node in tree if not node["ignored"] and node["role"]["value"] in roles]
    nameless = [node for node in shown if not node.get("name", {}).get("value")]
    assert nameless == []
    names = [(node["role"]["value"], node["name"]["value"]) for node in shown]
    for wanted in (
        ("textbox", "Message"), ("button", "Send"), ("heading", "You"), ("heading", "Answer"),
        ("combobox", "Colours"), ("navigation", "Conversations"), ("button", "Delete What?"),
        ("button", "Copy the code (sh)"), ("region", "Table"), ("region", "Messages"),
    ):  # fmt: skip
        assert wanted in names, wanted


async def test_paragraphs_are_said_and_not_tokens(tab, engine):
    await tab.js("""
        window.said = [];
        new MutationObserver((records) => {
            for (const record of records) {
                for (const node of record.addedNodes) window.said.push(node.textContent);
            }
        }).observe(document.getElementById("announcer"), { childList: true });
    """)
    engine.say("The first paragraph.\n\nThe *second* one.\n\n```sh\nls\npwd\n```\n\nThe last.")
    await tab.say("What?")
    await tab.answered()
    await tab.until("window.said.at(-1) === 'The answer is complete.'")
    assert await tab.js("window.said") == [
        "Waiting for the answer.", "The first paragraph.", "The second one.", "Code, 2 lines.",
        "The last.", "The answer is complete.",
    ]  # fmt: skip
    live = "document.querySelector('#messages').closest('[aria-live]')"
    assert await tab.js(f"{live} === null")
    assert await tab.js("document.getElementById('announcer').ariaLive") == "polite"


async def test_whoever_reads_above_is_not_moved(tab, engine):
    size = {"width": 800, "height": 400, "deviceScaleFactor": 1, "mobile": False}
    await tab.send("Emulation.setDeviceMetricsOverride", **size)
    engine.say("line\n\n" * 40, finish="")
    await tab.say("Go on.")
    await tab.until("document.querySelectorAll('.block').length === 40")
    scroll = "document.getElementById('scroll')"
    near = f"{scroll}.scrollHeight - {scroll}.scrollTop - {scroll}.clientHeight < 60"
    await tab.until(near)
    await tab.js(f"{scroll}.scrollTop = 10")
    stream = engine.streams[0]
    for byte in b"more\n\n" * 5:
        stream.put(Chunk([byte]))
    await tab.until("document.querySelectorAll('.block').length >= 44")
    assert await tab.js(f"{scroll}.scrollTop") == 10


LIGHT, DARK = "rgb(255, 255, 255)", "rgb(22, 23, 27)"
GROUND = "getComputedStyle(document.body).backgroundColor"


async def test_colours(tab):
    async def system(scheme):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await tab.send("Emulation.setEmulatedMedia", features=[feature])

    async def choose(value):
        await tab.js(f"document.getElementById('theme').value = {json.dumps(value)}")
        await tab.js("document.getElementById('theme').dispatchEvent(new Event('change'))")

    for scheme, colour in (("light", LIGHT), ("dark", DARK)):
        await system(scheme)
        assert await tab.js(GROUND) == colour
    await choose("light")
    assert await tab.js(GROUND) == LIGHT
    await tab.send("Page.reload")
    await tab.until("document.title.includes('tiny/model')")
    assert await tab.js(GROUND) == LIGHT
    assert await tab.js("document.getElementById('theme').value") == "light"
    await choose("")
    assert await tab.js(GROUND) == DARK


# Relative luminance and contrast as WCAG 2 defines them.
CONTRAST = """
((selector) => {
    const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map(Number)
        .map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const element = document.querySelector(selector);
    let behind = element;
    while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") {
        behind = behind.parentElement;
    }
    const [a, b] = [light(getComputedStyle(element).color),
                    light(getComputedStyle(behind).backgroundColor)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
})
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_contrast(tab, engine, scheme):
    feature = {"name": "prefers-color-scheme", "value": scheme}
    await tab.send("Emulation.setEmulatedMedia", features=[feature])
    engine.say('`x` [a](https://b.c)\n\n```python\n@f\ndef f(x=1):  # why\n    return "s"\n```')
    await tab.say("What?")
    await tab.answered()
    await tab.until("document.querySelector('.hljs-keyword')")
    for selector in (
        "#model", "#to-chat", "#to-status", "#send", "#keys", ".stats", ".user .content",
        ".message h2", ".block a", ".block code", ".bar", ".hljs-keyword", ".hljs-comment",
        ".hljs-string", ".hljs-number", ".hljs-title", ".hljs-meta", "#new",
    ):  # fmt: skip
        ratio = await tab.js(f"{CONTRAST}({json.dumps(selector)})")
        assert ratio >= 4.5, (selector, ratio)


@pytest.mark.parametrize("width", [360, 1200])
async def test_nothing_is_wider_than_the_window(tab, engine, width):
    size = {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": width < 500}
    await tab.send("Emulation.setDeviceMetricsOverride", **size)
    engine.say("x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n\n|" + "z" * 300 + "|b|\n|-|-|\n|1|2|")
    await tab.say("w" * 300)
    await tab.answered()
    assert await tab.js("document.documentElement.scrollWidth <= innerWidth")
    await tab.js("location.hash = '#status'")
    await tab.until("document.querySelector('#status dd').checkVisibility()")
    assert await tab.js("document.documentElement.scrollWidth <= innerWidth")
    await tab.js("location.hash = '#new'")
    await tab.until("document.getElementById('text').checkVisibility()")
    assert await tab.js("document.getElementById('text').getBoundingClientRect().bottom < 700")


async def test_the_list_of_a_narrow_window(tab):
    size = {"width": 360, "height": 700, "deviceScaleFactor": 1, "mobile": True}
    await tab.send("Emulation.setDeviceMetricsOverride", **size)
    visible = "document.getElementById('sidebar').checkVisibility()"
    assert not await tab.js(visible)
    await tab.click("#menu")
    assert await tab.js(visible)
    assert await tab.js("document.getElementById('menu').ariaExpanded") == "true"
    await tab.click("#new")
    await tab.until(f"!{visible}")
