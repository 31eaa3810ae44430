"""The chat client against a small server that speaks as ours does, over a real socket."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web
from voltapile.gateway.cli import chat


class Server:
    """Answers every chat with the pieces it was given; runs in a thread of its own."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.pieces: list[str] = ["Hel", "lo é"]
        self.status = 200
        self.error: dict[str, Any] | None = None
        self.breaks = False
        self.params: dict[str, Any] | None = None  # of /props; None: not there

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]})

    async def props(self, request: web.Request) -> web.Response:
        if self.params is None:
            raise web.HTTPNotFound
        return web.json_response({"default_generation_settings": {"params": self.params}})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        if self.status != 200:
            return web.json_response({"error": {"message": "be polite"}}, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": keep-alive\n\n")
        for piece in self.pieces:
            event = {"choices": [{"index": 0, "delta": {"content": piece}}]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if self.error is not None:
            await response.write(b"data: " + json.dumps({"error": self.error}).encode() + b"\n\n")
        elif not self.breaks:
            await response.write(b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')
        return response


@pytest.fixture
def server() -> Iterator[tuple[Server, str]]:
    """(server, its URL)."""
    made, ready, url = Server(), threading.Event(), ""
    end: list[Callable[[], object]] = []

    async def main() -> None:
        nonlocal url
        app = web.Application()
        app.router.add_get("/v1/models", made.models)
        app.router.add_get("/props", made.props)
        app.router.add_post("/v1/chat/completions", made.chat)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        end.append(lambda: loop.call_soon_threadsafe(stop.set))
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert ready.wait(10)
    yield made, url
    end[0]()
    thread.join(10)


class Terminal(io.StringIO):
    """Standard input that a person types into."""

    def isatty(self) -> bool:
        return True


Say = Callable[..., int]


@pytest.fixture
def say(server: tuple[Server, str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """say(text, *options, terminal=False) -> exit code of voltapile chat."""

    def run(text: str, *options: str, terminal: bool = False) -> int:
        parser = argparse.ArgumentParser()
        chat.add_arguments(parser)
        stdin = Terminal(text) if terminal else io.StringIO(text)
        monkeypatch.setattr("sys.stdin", stdin)
        return chat.run(parser.parse_args(["--url", server[1], *options]))

    return run


def test_piped_text_is_one_message(
    server: tuple[Server, str], say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--system", "be brief", "--temperature", "0", "--seed", "7", "--api-key", "k")
    assert say("hi\nthere\n", *options) == 0
    assert capsys.readouterr().out == "Hello é\n"
    assert server[0].bodies == [
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "hi\nthere"},
            ],
            "stream": True,
            "temperature": 0.0,
            "seed": 7,
        }
    ]
    assert server[0].keys == ["Bearer k"]


def test_turns_at_a_terminal(
    server: tuple[Server, str], say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say("one\n\ntwo\n/reset\nthree\n", terminal=True) == 0
    sent = [[m["content"] for m in body["messages"]] for body in server[0].bodies]
    assert sent == [["one"], ["one", "Hello é", "two"], ["three"]]
    out = capsys.readouterr().out
    assert out.startswith(f"tiny at {server[1]}. Ctrl-C")
    assert out.count("Hello é\n") == 3


def test_sampling_is_the_servers_unless_said(server: tuple[Server, str], say: Say) -> None:
    server[0].params = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": -1}
    assert say("hi", "--top-k", "3") == 0
    (body,) = server[0].bodies
    found = {name: value for name, value in body.items() if name not in ("messages", "stream")}
    assert found == {"temperature": 0.8, "top_k": 3, "top_p": 0.95, "min_p": 0.05}


def test_commands(server: tuple[Server, str], say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert say("/nonsense here\n/help\n /etc is sent\n/quit\nnever\n", terminal=True) == 0
    assert [body["messages"][0]["content"] for body in server[0].bodies] == ["/etc is sent"]
    out = capsys.readouterr().out
    assert "there is no command /nonsense; " in out
    assert out.count("/reset   forget the conversation") == 2


@pytest.mark.parametrize("shape", ["{}", "{}/", "{}/v1", "{}/v1/"])
@pytest.mark.parametrize("scheme", ["http://", ""])
def test_urls_as_people_write_them(
    server: tuple[Server, str], say: Say, shape: str, scheme: str
) -> None:
    url = shape.format(server[1]).replace("http://", scheme)
    assert say("hi", "--url", url) == 0
    assert len(server[0].bodies) == 1


def test_ctrl_c_keeps_what_was_said(
    server: tuple[Server, str],
    say: Say,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = chat._text
    seen: list[str] = []

    def interrupted(event: dict[str, Any]) -> str:
        seen.append(original(event))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return seen[-1]

    monkeypatch.setattr(chat, "_text", interrupted)
    assert say("one\ntwo\n", terminal=True) == 0
    assert [m["content"] for m in server[0].bodies[1]["messages"]] == ["one", "Hel", "two"]
    assert "Hel (stopped)" in capsys.readouterr().out


def test_a_failed_turn_is_forgotten(
    server: tuple[Server, str], say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    server[0].error = {"message": "rank 0 died"}
    assert say("one\ntwo\n", terminal=True) == 0
    assert [m["content"] for m in server[0].bodies[1]["messages"]] == ["two"]
    assert "the server failed: rank 0 died" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "words"),
    [(400, r"refused \(400\): be polite"), (503, "is not ready: be polite")],
)
def test_a_refusal_is_passed_on(
    server: tuple[Server, str], say: Say, status: int, words: str
) -> None:
    server[0].status = status
    with pytest.raises(chat.ChatError, match=words):
        say("hi")


def test_an_answer_that_breaks_off(server: tuple[Server, str], say: Say) -> None:
    server[0].breaks = True
    with pytest.raises(chat.ChatError, match="before it was complete"):
        say("hi")


@pytest.mark.parametrize("terminal", [False, True])
def test_no_server(say: Say, unused_tcp_port: int, terminal: bool) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    with pytest.raises(chat.ChatError, match=f"no server answers at {url}; start one with"):
        say("hi", "--url", url, terminal=terminal)


def test_nothing_to_say_and_nowhere_to_say_it(say: Say) -> None:
    with pytest.raises(chat.ChatError, match="standard input is empty"):
        say(" \n")
    with pytest.raises(chat.ChatError, match="is not a URL"):
        say("hi", "--url", "http://:nonsense")
