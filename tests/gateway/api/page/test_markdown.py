"""Markdown that grows: the same in the end as drawn at once, and what is settled stays."""

import json

ANSWER = ".assistant .content"
TEXT = """# Title

A *first* paragraph with `code`, a [link](https://example.com), and a [reference].

Setext
------

1. one
2. two
   - inner

   more of two
3. three

- [x] done
- [ ] open

> quoted
> > twice

| a | b |
|---|--:|
| 1 | **2** |

```python
def f(x):

    return "```"
```

    indented

~~~
another fence
~~~

***

Line one\\
line two<br>three &amp; four

[reference]: https://example.com/there
"""
# Draws TEXT in pieces of some size, and at once; gives both.
DRAW = """
(async () => {
    const { Markdown } = await import("/page/markdown.js");
    const text = %s, size = %d;
    const [grown, whole] = [document.createElement("div"), document.createElement("div")];
    const markdown = new Markdown(grown);
    let numFinal = 0;
    for (let end = 0; end < text.length; end += size) {
        numFinal += markdown.update(text.slice(0, end)).length;
    }
    numFinal += markdown.update(text, true).length;
    new Markdown(whole).update(text, true);
    const isColoured = (each) => each.querySelector(".hljs-keyword");
    while (!isColoured(grown) || !isColoured(whole)) {
        await new Promise((done) => setTimeout(done, 5));
    }
    return [grown.innerHTML, whole.innerHTML, numFinal, whole.children.length];
})()
"""


async def drawn(tab, text, size):
    return await tab.js(DRAW % (json.dumps(text), size))


async def test_in_pieces_as_at_once(tab):
    for size in (1, 3, 7, 64):
        grown, whole, num_final, num_blocks = await drawn(tab, TEXT, size)
        assert grown == whole, size
        assert num_final == num_blocks, size  # each block was given once, to be said aloud


async def test_what_it_looks_like(tab):
    _, html, *_ = await drawn(tab, TEXT, 1000)
    assert "<h3>Title</h3>" in html  # below the page's own headings
    assert 'href="https://example.com/there"' in html
    assert "☑ done" in html
    assert html.count("<table>") == 1
    assert 'class="language-python"' in html
    assert "hljs-keyword" in html
    assert "line two<br>three &amp; four" in html


async def test_line_ends_of_other_systems(tab):
    text = TEXT.replace("\n", "\r\n")
    grown, *_ = await drawn(tab, text, 5)
    _, whole, *_ = await drawn(tab, TEXT, 1000)
    assert grown == whole


async def test_settled_blocks_are_not_drawn_again(tab):
    again = await tab.js("""
        (async () => {
            const { Markdown } = await import("/page/markdown.js");
            const element = document.createElement("div");
            const markdown = new Markdown(element);
            let text = "", seen = null, count = 0;
            const observer = new MutationObserver((records) => (count += records.length));
            for (let i = 0; i < 300; i++) {
                text += `Paragraph ${i}\\n\\n`;
                markdown.update(text);
                seen ??= element.firstChild;
            }
            observer.observe(element, { childList: true, subtree: true });
            for (let i = 0; i < 20; i++) markdown.update(text += " word");
            await null;
            observer.disconnect();
            return [seen === element.firstChild, count];
        })()
    """)
    same, count = again
    assert same
    assert count <= 2 * 20


async def test_an_answer_is_drawn_once_a_frame(tab, engine):
    """2,000 tokens as fast as they come."""
    await tab.js("""
        window.draws = 0; window.frames = 0;
        const count = () => { window.frames++; requestAnimationFrame(count); };
        requestAnimationFrame(count);
        new MutationObserver(() => window.draws++).observe(document.getElementById("messages"),
            { subtree: true, childList: true, characterData: true });
    """)
    engine.say("word " * 400)
    await tab.say("Write.")
    await tab.answered()
    assert (await tab.text(ANSWER)).count("word") == 400
    assert await tab.js("window.draws <= 2 * window.frames + 5")
    assert await tab.js("window.draws < 300")


async def test_copy_code(tab, engine):
    engine.say("```sh\necho <b>\n```")
    await tab.say("What?")
    await tab.answered()
    origin = await tab.js("location.origin")
    await tab.send("Browser.grantPermissions", origin=origin, browserContextId=tab.context,
                   permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])  # fmt: skip
    await tab.click(".code button")
    await tab.until("document.querySelector('.code button').innerText === 'Copied'")
    assert await tab.js("navigator.clipboard.readText()") == "echo <b>\n"
