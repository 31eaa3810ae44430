"""Two tabs of one browser, which share its storage: one conversation in both."""

import aiohttp
import pytest
import pytest_asyncio

pytestmark = pytest.mark.slow

ANSWER = ".assistant .content"
TITLES = "[...document.querySelectorAll('#conversations a')].map((each) => each.innerText).join()"
TROUBLE = "document.getElementById('trouble').innerText"
MESSAGES = "document.querySelectorAll('.message').length"


@pytest_asyncio.fixture
async def beside(chromium, tab, client):
    """A tab in a window of its own that shows what `tab` shows."""
    async with aiohttp.ClientSession() as session:
        other = type(tab)(await session.ws_connect(chromium, max_msg_size=0))
        asked = {"url": "about:blank", "browserContextId": tab.context, "newWindow": True}
        target = (await other.send("Target.createTarget", **asked))["targetId"]
        attached = await other.send("Target.attachToTarget", targetId=target, flatten=True)
        other.session = attached["sessionId"]
        for domain in ("Runtime", "Page", "Log"):
            await other.send(f"{domain}.enable")

        async def show():
            await other.go(f"{client._base_url}{await tab.js('location.hash')}")
            await other.until("document.title.includes('tiny/model')")
            return other

        yield show
        other.session = ""
        await other.send("Target.closeTarget", targetId=target)
        await other._socket.close()
        await other._reader
        assert other.problems == []


async def half(tab, engine):
    """An answer that has begun and goes on."""
    engine.say("half", finish="")
    await tab.say("What?")
    await tab.until(f"document.querySelector('{ANSWER}')?.innerText === 'half'")
    await tab.until("location.hash.startsWith('#c/')")


async def test_what_was_deleted_elsewhere_stays_deleted(tab, engine, beside):
    await tab.say("One")
    await tab.answered()
    other = await beside()
    await other.click("#conversations .delete")
    await tab.until(f"{TROUBLE}.includes('deleted')")
    await tab.until(f"{TITLES} === ''")
    assert await tab.js(MESSAGES) == 2, "what is shown stays"
    await tab.send("Page.reload")
    await tab.until("document.title.includes('tiny/model')")
    await tab.until("location.hash === '#new'")
    assert await tab.js(TITLES) == ""


async def test_an_answer_to_what_was_deleted_elsewhere_ends(tab, engine, beside):
    await half(tab, engine)
    other = await beside()
    await other.click("#conversations .delete")
    await engine.streams[0].cancelled.wait()
    await tab.until("!document.getElementById('send').hidden")
    await tab.until("document.querySelector('.note')?.innerText.includes('stopped')")
    assert await tab.js(TITLES) == ""
    assert await other.js(TITLES) == ""


async def test_a_deletion_that_nobody_told_of(tab, engine):
    """The storage itself says so, as a tab may sleep while another one deletes."""
    await half(tab, engine)
    await tab.js("""
        new Promise((done) => { const open = indexedDB.open("voltapile", 1);
        open.onsuccess = () => {
            const change = open.result.transaction(["conversations", "titles"], "readwrite");
            for (const name of change.objectStoreNames) change.objectStore(name).clear();
            change.oncomplete = () => done(1);
        } })
    """)
    await tab.click("#stop")
    await tab.until(f"{TROUBLE}.includes('deleted')")
    rows = "import('/page/store.js').then(({ everything }) => everything())"
    assert await tab.js(rows) == []


async def test_who_writes_on_keeps_it_again(tab, engine, beside):
    await tab.say("One")
    await tab.answered()
    other = await beside()
    await other.click("#conversations .delete")
    await tab.until(f"{TROUBLE}.includes('deleted')")
    await tab.say("Two")
    await tab.answered(2)
    await other.until(f"{TITLES} === 'One'")
    assert await tab.js(TROUBLE) == ""
    await other.click("#conversations a")
    await other.until(f"{MESSAGES} === 4")


async def test_an_answer_that_comes_to_another_tab_is_shown_and_can_be_stopped(tab, engine, beside):
    await half(tab, engine)
    other = await beside()
    await other.until(f"document.querySelector('{ANSWER}')")
    await other.until("!document.getElementById('stop').hidden")
    assert await other.js("document.querySelector('.error:not([hidden])') === null")
    await other.say("Meanwhile")  # which waits for the answer
    assert await other.js(MESSAGES) == 2
    await other.click("#stop")
    await engine.streams[0].cancelled.wait()
    await other.until("document.querySelector('.note')?.innerText.includes('stopped')")
    await other.until("!document.getElementById('send').hidden")
    assert await other.text(ANSWER) == "half"


async def test_a_tab_that_was_closed_during_its_answer(tab, engine, beside):
    await half(tab, engine)
    await tab.until(f"{TITLES} === 'What?'")
    other = await beside()
    await other.until("!document.getElementById('stop').hidden")
    await tab.go("about:blank#gone")
    await other.until("document.querySelector('.error')?.innerText.includes('page was closed')")
    await other.until("!document.getElementById('send').hidden")
