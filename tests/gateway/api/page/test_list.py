"""Several conversations: the list, switching while answers come, deleting, exporting, two tabs."""

import json

import pytest

pytestmark = pytest.mark.slow

ANSWER = ".assistant .content"
TITLES = "[...document.querySelectorAll('#conversations a')].map((each) => each.innerText)"


async def talk(tab, text):
    await tab.say(text)
    await tab.answered()
    await tab.kept()


async def test_two_conversations(tab, engine):
    engine.say("To one.")
    await talk(tab, "One")
    await tab.click("#new")
    await tab.until("document.querySelectorAll('.message').length === 0")
    await tab.until("document.activeElement.id === 'text'")
    engine.say("To two.")
    await talk(tab, "Two")
    assert bytes(engine.prompts[-1]) == b"user:Two\n"
    await tab.until(f"{TITLES}.join() === 'Two,One'")
    await tab.click("#conversations li:last-child a")
    await tab.until(f"document.querySelector('{ANSWER}')?.innerText === 'To one.'")
    await tab.js("history.back()")
    await tab.until(f"document.querySelector('{ANSWER}')?.innerText === 'To two.'")


async def test_an_answer_goes_on_while_another_conversation_is_open(tab, engine):
    engine.say("slow", finish="")
    await tab.say("One")
    await tab.until(f"document.querySelector('{ANSWER}')?.innerText === 'slow'")
    await tab.click("#new")
    await tab.until("!document.getElementById('send').hidden")
    engine.say("To two.")
    await talk(tab, "Two")
    assert not engine.streams[0].cancelled.is_set()
    await tab.click("#conversations li:last-child a")
    await tab.until("!document.getElementById('stop').hidden")
    assert await tab.text(ANSWER) == "slow"
    await tab.click("#stop")
    await tab.answered()
    assert await tab.text(ANSWER) == "slow"


async def test_delete(tab, engine):
    await talk(tab, "One")
    await tab.click("#new")
    await talk(tab, "Two")
    await tab.click("#conversations li:last-child .delete")
    await tab.until(f"{TITLES}.join() === 'Two'")
    assert "One" in tab.dialogs[0]
    assert await tab.js("document.querySelectorAll('.message').length") == 2
    engine.say("still", finish="")
    await tab.say("Go on")
    await tab.until("document.querySelectorAll('.assistant').length === 2")
    await tab.click("#conversations .delete")
    await tab.until("document.querySelectorAll('.message').length === 0")
    await engine.streams[-1].cancelled.wait()
    await tab.send("Page.reload")
    await tab.until("document.title.includes('tiny/model')")
    assert await tab.js(TITLES) == []
    assert await tab.js("document.getElementById('export').disabled")


async def test_a_conversation_that_is_gone(tab, client):
    await tab.go(f"{client._base_url}#c/0123456789abcdef")
    await tab.until("location.hash === '#new'")
    await talk(tab, "Hello?")


async def test_export(tab, engine):
    engine.say("<b>é</b>")
    await talk(tab, "What?")
    await tab.js("URL.createObjectURL = (blob) => { window.exported = blob.text(); return '#x' }")
    await tab.click("#export")
    await tab.until("window.exported")
    content = json.loads(await tab.js("window.exported"))
    [conversation] = content["conversations"]
    said = [(each["role"], each["content"]) for each in conversation["messages"]]
    assert said == [("user", "What?"), ("assistant", "<b>é</b>")]


async def test_a_page_that_was_closed_too_early(tab, engine):
    engine.say("half", finish="")
    await tab.say("What?")
    await tab.until(f"document.querySelector('{ANSWER}')?.innerText === 'half'")
    await tab.until("location.hash.startsWith('#c/')")  # it has been saved once
    await tab.send("Page.reload")
    await tab.until("document.querySelector('.error')?.innerText.includes('page was closed')")
    engine.say("Whole.")
    await tab.click(".assistant .buttons button:last-child")
    await tab.until(f"document.querySelector('{ANSWER}')?.innerText === 'Whole.'")


async def test_a_browser_that_keeps_nothing(tab, engine, client):
    await tab.send("Page.addScriptToEvaluateOnNewDocument", source="""
        IDBFactory.prototype.open = () => { throw new DOMException("no", "SecurityError"); };
    """)  # fmt: skip
    await tab.send("Page.reload")
    await tab.until("document.title.includes('tiny/model')")
    engine.say("To one.")
    await talk(tab, "One")
    await tab.until("document.getElementById('trouble').innerText.includes('keeps no conv')")
    await tab.click("#new")
    await talk(tab, "Two")
    await tab.click("#conversations li:last-child a")
    await tab.until(f"document.querySelector('{ANSWER}')?.innerText === 'To one.'")


async def test_another_tab_is_heard(tab):
    """Its storage, and what it says when it has saved."""
    other = "new BroadcastChannel('voltapile')"
    saved = "{id: 'ab', title: 'Elsewhere', changed: 1}"
    await tab.js(
        "new Promise((done) => { const open = indexedDB.open('voltapile', 1);"
        "open.onsuccess = () => { const put = open.result"
        f".transaction('titles', 'readwrite').objectStore('titles').put({saved});"
        "put.onsuccess = done; } }).then(() => 1)"
    )
    assert await tab.js(TITLES) == []
    await tab.js(f"{other}.postMessage({{id: 'ab', what: 'saved'}})")
    await tab.until(f"{TITLES}.join() === 'Elsewhere'")


async def test_a_long_conversation_is_drawn_from_its_end(tab):
    await tab.js("""
        (async () => {
            const { save } = await import("/page/store.js");
            const text = "# Title\\n\\ntext ".repeat(20);
            const said = (i) => [
                { role: "user", content: `Question ${i}` },
                { role: "assistant", content: text, finish: "stop" },
            ];
            const messages = Array.from({ length: 200 }, (_, i) => said(i)).flat();
            await save({ id: "long", title: "Long", created: 1, messages }, true);
            window.atFirst = new Promise((done) => new MutationObserver(() => {
                const answers = [...document.querySelectorAll(".assistant")];
                done(answers.map((each) => !!each.querySelector("h3")));
            }).observe(document.getElementById("messages"), { childList: true }));
            location.hash = "#c/long";
        })()
    """)
    drawn = await tab.js("window.atFirst")
    assert len(drawn) == 200
    assert drawn[-1]
    await tab.until("[...document.querySelectorAll('.assistant')].every((m) => m.innerHTML"
                    ".includes('<h3>'))")  # fmt: skip
    scroll = "document.getElementById('scroll')"
    await tab.until(f"{scroll}.scrollHeight - {scroll}.scrollTop - {scroll}.clientHeight < 60")
    first = await tab.js("document.querySelector('.user') === (window.first ??= "
                         "document.querySelector('.user'))")  # fmt: skip
    assert first
    await tab.say("And now?")
    await tab.until("document.querySelectorAll('.message').length === 402")
    assert await tab.js("document.querySelector('.user') === window.first")  # not made again
