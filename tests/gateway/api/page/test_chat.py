"""The chat in a browser: what is said, shown, kept, stopped and asked again."""


async def test_an_answer_comes_and_stays(tab, engine):
    engine.say("Some **bold** words.")
    await tab.say("Hello?")
    await tab.answered()
    assert await tab.text(".assistant .content") == "Some bold words."
    assert await tab.js("document.querySelector('.assistant strong').textContent") == "bold"
