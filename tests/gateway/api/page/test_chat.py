"""The chat in a browser: what is said, shown, kept, stopped and asked again."""

import pytest
from voltapile.gateway.engine import EngineUnavailable, Health
from voltapile.gateway.request import Chunk

ANSWER = ".assistant .content"


def prompt(engine):
    return bytes(engine.prompts[-1]).decode()


async def choose(tab, **values):
    """Saves settings."""
    await tab.click("#open-settings")
    for name, value in values.items():
        await tab.js(f"document.querySelector('#settings [name={name}]').value = {value!r}")
    await tab.click("#settings [type=submit]")


async def test_an_answer_comes_and_is_kept(tab, engine):
    engine.say("Some **bold** words.")
    await tab.say("Hello?")
    await tab.answered()
    assert await tab.text(ANSWER) == "Some bold words."
    assert await tab.text(".assistant strong") == "bold"
    assert "19 tokens" not in await tab.text(".stats")
    assert "21 tokens" in await tab.text(".stats")
    await tab.kept()
    await tab.send("Page.reload")
    await tab.until(f"document.querySelector('{ANSWER}')?.innerText === 'Some bold words.'")
    assert await tab.text("#conversations [aria-current]") == "Hello?"
    await tab.say("And now?")
    await tab.answered(2)
    assert prompt(engine) == "user:Hello?\nassistant:Some **bold** words.\nuser:And now?\n"


async def test_enter_sends_and_shift_enter_does_not(tab, engine):
    engine.say("Yes.")
    await tab.js("document.getElementById('text').focus()")
    await tab.type("one")
    await tab.press("Enter", modifiers=8)
    await tab.type("two")
    assert not engine.prompts
    await tab.press("Enter")
    await tab.answered()
    assert prompt(engine) == "user:one\ntwo\n"
    await tab.press("Enter")
    assert len(engine.prompts) == 1  # nothing was written


async def test_the_servers_defaults_and_the_persons_settings(tab, engine):
    await tab.say("Hello?")
    await tab.answered()
    first = engine.sampling[-1]
    assert (first.temperature, first.top_k, first.top_p) == (0.8, 40, 0.95)
    await choose(tab, system="Be brief.", temperature="0", max_tokens="7", extra='{"top_k": 3}')
    await tab.click(".assistant:last-child .buttons button:last-child")
    await tab.until("document.querySelectorAll('[aria-busy=false]').length === 1")
    second = engine.sampling[-1]
    assert (second.temperature, second.top_k, second.top_p) == (0, 3, 0.95)
    assert prompt(engine).startswith("system:Be brief.\nuser:Hello?")
    assert second.max_position == len(engine.prompts[-1]) + 7
    await tab.send("Page.reload")
    await tab.until("document.title.includes('tiny/model')")
    await tab.click("#open-settings")
    assert await tab.js("document.querySelector('#settings [name=temperature]').value") == "0"
    assert await tab.js("document.querySelector('#set-min_p').placeholder") == "0.05"


@pytest.mark.parametrize("extra", ["[1]", "{", "3"])
async def test_settings_that_are_no_json(tab, extra):
    await choose(tab, extra=extra)
    assert "JSON" in await tab.text("#settings-error")
    assert await tab.js("document.getElementById('settings').open")


@pytest.mark.parametrize("way", ["button", "key"])
async def test_stop(tab, engine, way):
    engine.say("abc", finish="")
    await tab.say("Go on.")
    await tab.until(f"document.querySelector('{ANSWER}')?.innerText === 'abc'")
    if way == "button":
        await tab.click("#stop")
    else:
        await tab.press("Escape")
    await tab.answered()
    assert "stopped" in await tab.text(".note")
    await tab.until("!document.getElementById('send').hidden")
    await engine.streams[0].cancelled.wait()
    assert await tab.js("document.activeElement.id") == "text"


async def test_regenerate_and_edit(tab, engine):
    engine.say("First.")
    await tab.say("What?")
    await tab.answered()
    engine.say("Second.")
    await tab.click(".assistant .buttons button:last-child")
    await tab.until(f"document.querySelector('{ANSWER}')?.innerText === 'Second.'")
    await tab.answered()
    assert prompt(engine) == "user:What?\n"
    engine.say("Third.")
    await tab.click(".user .buttons button:last-child")
    assert await tab.js("document.activeElement.value") == "What?"
    await tab.type(" Why?")
    await tab.click(".edit [type=submit]")
    await tab.until(f"document.querySelector('{ANSWER}')?.innerText === 'Third.'")
    assert prompt(engine) == "user:What? Why?\n"
    assert await tab.js("document.querySelectorAll('.message').length") == 2


async def test_an_edit_can_be_given_up(tab):
    await tab.say("What?")
    await tab.answered()
    await tab.click(".user .buttons button:last-child")
    await tab.press("Escape")
    assert await tab.text(".user .content") == "What?"
    assert await tab.js("document.activeElement.textContent") == "Edit"


async def test_reasoning_is_folded(tab, engine):
    engine.say("<think>\nSo *many* words.\n</think>\n\nShort.")
    await choose(tab, thinking="off")
    await choose(tab, thinking="")
    await tab.say("What?")
    await tab.answered()
    assert await tab.text(ANSWER) == "Short."
    assert not await tab.js("document.querySelector('.reasoning').open")
    assert await tab.text(".reasoning summary") == "Reasoning"
    shown = await tab.js("document.querySelector('.reasoning div').textContent")
    assert shown.strip() == "So *many* words."


async def test_thinking_can_be_chosen(tab, engine):
    await choose(tab, thinking="off")
    await tab.say("What?")
    await tab.answered()
    assert prompt(engine).endswith("<think>\n\n</think>\n\n")


async def test_tool_calls_are_shown(tab, engine):
    engine.say('<tool_call>\n{"name": "look", "arguments": {"at": "<b>é</b>"}}\n</tool_call>')
    tool = '{"tools": [{"type": "function", "function": {"name": "look"}}]}'
    await choose(tab, extra=tool)
    await tab.say("Look!")
    await tab.answered()
    assert await tab.text(".calls summary") == "Tool call: look"
    assert await tab.text(".calls pre") == '{\n  "at": "<b>é</b>"\n}'


async def test_an_error_of_the_stream(tab, engine):
    engine.script = [Chunk([65]), RuntimeError("broken")]
    await tab.say("What?")
    await tab.answered()
    assert await tab.text(ANSWER) == "A"
    assert await tab.text(".error") == "internal error"
    engine.say("Better.")
    assert await tab.text(".assistant .buttons button:last-child") == "Try again"
    await tab.click(".assistant .buttons button:last-child")
    await tab.until(f"document.querySelector('{ANSWER}')?.innerText === 'Better.'")
    assert await tab.js("document.querySelector('.error').hidden")


async def test_a_lost_connection(tab, engine):
    engine.script = [Chunk([65]), ConnectionResetError()]
    await tab.say("What?")
    await tab.answered()
    assert "connection was lost" in await tab.text(".error")
    offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    await tab.send("Network.emulateNetworkConditions", offline=True, **offline)
    await tab.click(".assistant .buttons button:last-child")
    await tab.until("document.querySelector('.error').innerText.includes('cannot be reached')")
    await tab.answered()
    await tab.send("Network.emulateNetworkConditions", offline=False, **offline)
    engine.say("Back.")
    await tab.click(".assistant .buttons button:last-child")
    await tab.until(f"document.querySelector('{ANSWER}')?.innerText === 'Back.'")


async def test_a_refusal_is_shown(tab, engine):
    engine.refusal = EngineUnavailable("the model is loading", 7)
    await tab.say("What?")
    await tab.answered()
    assert await tab.text(".error") == "the model is loading (try again in 7 s)"
    await choose(tab, extra='{"top_p": 7}')
    await tab.click(".assistant .buttons button:last-child")
    await tab.until("document.querySelector('.error').innerText.includes('top_p')")


async def test_waiting_for_a_place(tab, engine):
    engine.script = [60.0]
    await tab.say("What?")
    await tab.until("document.querySelector('.wait').innerText.startsWith('Waiting for a place')")
    assert "11 tokens" in await tab.text(".wait")
    engine.streams[0].request.computed = 4
    await tab.until("document.querySelector('.wait').innerText.includes('4 of 11 tokens')")


async def test_a_model_that_is_loading(serve, engine, open_tab):
    engine.health = Health("loading", "weights", 0.5)
    client = await serve()
    tab = await open_tab(str(client._base_url))
    await tab.until("!document.getElementById('banner').hidden")
    assert await tab.text("#banner") == "The model is loading: weights, 50 %"
    engine.health = Health("ok")
    await tab.until("document.getElementById('banner').hidden")


async def test_a_server_with_a_key(serve, engine, open_tab):
    client = await serve(api_keys=["secret"])
    tab = await open_tab(str(client._base_url))
    await tab.until("document.getElementById('settings').open")
    assert "API key is needed" in await tab.text("#settings-error")
    assert await tab.js("document.activeElement.name") == "key"
    await tab.type("wrong")
    await tab.press("Enter")
    await tab.until("document.querySelector('#settings-error').innerText.includes('not valid')")
    await tab.js("document.querySelector('#settings [name=key]').select()")
    await tab.type("secret")
    await tab.press("Enter")
    await tab.until("document.title.includes('tiny/model')")
    await tab.say("Hello?")
    await tab.answered()
    assert await tab.text(ANSWER) == "Hello"
    assert "secret" in await tab.js("JSON.stringify(sessionStorage)")
    assert "secret" not in await tab.js("JSON.stringify(localStorage)")
