"""A headless Chromium, driven over its DevTools protocol, and a tab that looks at the server.

Skips where no Chromium is installed (Debian's package is `chromium`).
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from voltapile.gateway.template import ChatTemplate
from voltapile.topology.plan import Plan

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
OPTIONS = (
    "--headless", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
SECONDS = 20.0  # that anything in a page may take
KEYS = {"Enter": "\r", "Escape": "", "Tab": "", " ": " "}


# Tools and reasoning as Qwen's; the messages so that a test can read them.
TEMPLATE = (
    "{% if tools %}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n"
    "{% elif enable_thinking is defined %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture(scope="session")
def template() -> Iterator[ChatTemplate]:
    made = ChatTemplate(TEMPLATE)
    yield made
    made.close()


@pytest.fixture
def plan(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, context=4096)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the browser's protocol."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium is here (Debian's package is chromium)")
    folder = tmp_path_factory.mktemp("chromium")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to run as root with one
    command = [path, *OPTIONS, *sandbox, f"--user-data-dir={folder}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            port, route = _listens(process, folder / "DevToolsActivePort")
            yield f"ws://127.0.0.1:{port}{route}"
        finally:
            process.kill()


def _listens(process: subprocess.Popen[bytes], file: Path) -> list[str]:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if file.exists() and len(lines := file.read_text().split()) == 2:
            return lines
        time.sleep(0.02)
    why = f"Chromium does not start (exit status {process.poll()})"
    if "CI" in os.environ:
        pytest.fail(why)
    pytest.skip(why)  # Ubuntu's chromium-browser is a note about another package


class Tab:
    """One page with storage of its own. problems: exceptions, and what the policy forbade."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self.dialogs: list[str] = []  # texts of confirm(), which is answered with yes
        self.requests: list[str] = []  # what was asked for, by URL
        self.session = ""
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read())

    async def send(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json(
            message | ({"sessionId": self.session} if self.session else {})
        )
        return await asyncio.wait_for(answer, SECONDS)

    async def open(self, url: str) -> None:
        context = await self.send("Target.createBrowserContext")
        self.context = context["browserContextId"]
        asked = {"url": "about:blank", "browserContextId": self.context}
        target = await self.send("Target.createTarget", **asked)
        attached = await self.send(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self.session = attached["sessionId"]
        for domain in ("Runtime", "Page", "Log", "Network"):
            await self.send(f"{domain}.enable")
        await self.go(url)

    async def go(self, url: str) -> None:
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def close(self) -> None:
        self.session = ""
        await self.send("Target.disposeBrowserContext", browserContextId=self.context)
        await self._socket.close()
        await self._reader

    async def js(self, expression: str) -> Any:
        """The value of an expression, or of its promise."""
        answer = await self._evaluate(expression)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    async def _evaluate(self, expression: str) -> dict[str, Any]:
        asked = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        found: dict[str, Any] = await self.send("Runtime.evaluate", expression=expression, **asked)
        return found

    async def until(self, expression: str) -> None:
        """Waits for a value that counts as true in JavaScript; an exception does not, since what
        an expression asks for may not be there yet."""
        deadline = time.monotonic() + SECONDS
        while True:
            answer = await self._evaluate(f"Promise.resolve({expression}).then(Boolean)")
            if answer["result"].get("value") is True:
                return
            if time.monotonic() > deadline:
                shown = await self.js("document.body.innerText")
                why = answer.get("exceptionDetails", "")
                pytest.fail(f"never true: {expression}\n{why}\n{shown}\n{self.problems}")
            await asyncio.sleep(0.02)

    async def text(self, selector: str) -> str:
        """As it is seen, once it is there and has been drawn."""
        found = f"document.querySelector({json.dumps(selector)})"
        await self.until(found)
        drawn = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
        return str(await self.js(f"{drawn}.then(() => {found}.innerText)"))

    async def click(self, selector: str) -> None:
        """Once it is there, is seen, and may be clicked."""
        found = f"document.querySelector({json.dumps(selector)})"
        may_be = "each.checkVisibility() && !each.disabled"
        await self.until(f"((each) => {may_be} && (each.click(), true))({found})")

    async def kept(self) -> None:
        """Until the open conversation lies in the browser with its last answer complete."""
        await self.until(
            "import('/page/store.js').then(({ load }) => load(location.hash.slice('#c/'.length)))"
            ".then((found) => found.messages.at(-1).finish)"
        )

    async def press(self, key: str, modifiers: int = 0) -> None:
        """Shift is modifier 8."""
        text = KEYS.get(key, key) if not modifiers or key == "Enter" else ""
        event = {"key": key, "code": key, "modifiers": modifiers}
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32}
        event |= {"windowsVirtualKeyCode": codes.get(key, 0)}
        down = event | ({"text": text} if text else {})
        await self.send("Input.dispatchKeyEvent", type="keyDown", **down)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    async def type(self, text: str) -> None:
        await self.send("Input.insertText", text=text)

    async def say(self, text: str) -> None:
        """Writes into the message box and presses Enter."""
        await self.js("document.getElementById('text').focus()")
        await self.type(text)
        await self.press("Enter")

    async def answered(self, count: int = 1) -> None:
        """Until `count` answers are complete, and another question may be asked."""
        done = ".message.assistant[aria-busy=false]"
        await self.until(
            f"document.querySelectorAll('{done}').length === {count}"
            " && !document.getElementById('send').hidden"
        )

    async def picture(self, path: Path) -> None:
        shot = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                answer = self._answers.pop(event["id"])
                if not answer.done():
                    self._settle(answer, event)
            else:
                self._hear(event["method"], event["params"])

    @staticmethod
    def _settle(answer: asyncio.Future[Any], event: dict[str, Any]) -> None:
        if "error" in event:
            answer.set_exception(RuntimeError(event["error"]["message"]))
        else:
            answer.set_result(event["result"])

    def _hear(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                thrown = details.get("exception", {}).get("description", details["text"])
                self.problems.append(thrown)
            case "Log.entryAdded" if params["entry"]["source"] == "security":
                self.problems.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Page.javascriptDialogOpening":
                self.dialogs.append(params["message"])
                self._accepting = asyncio.create_task(
                    self.send("Page.handleJavaScriptDialog", accept=True)
                )


OpenTab = Callable[..., Any]


@pytest_asyncio.fixture
async def open_tab(chromium: str) -> AsyncIterator[OpenTab]:
    """await open_tab(url) -> Tab. At the end none may have had a problem."""
    tabs: list[Tab] = []
    async with aiohttp.ClientSession() as session:

        async def start(url: str) -> Tab:
            socket = await session.ws_connect(chromium, max_msg_size=0)
            tab = Tab(socket)
            tabs.append(tab)
            await tab.open(url)
            return tab

        yield start
        for tab in tabs:
            await tab.close()
    assert [problem for tab in tabs for problem in tab.problems] == []


@pytest_asyncio.fixture
async def tab(client: aiohttp.ClientSession, open_tab: OpenTab) -> Tab:
    """The page of the scripted server."""
    found: Tab = await open_tab(str(client._base_url))
    await found.until("document.title.includes('tiny/model')")
    return found
