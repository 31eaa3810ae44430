"""A scripted engine, a vocabulary of single bytes, and a client of the real listener."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from voltapile.gateway.api.app import listening, make_app
from voltapile.gateway.engine import EngineStats, Health
from voltapile.gateway.request import Chunk, Request
from voltapile.gateway.stream import Stream
from voltapile.gateway.template import ChatTemplate
from voltapile.gateway.tokenizer import Tokenizer
from voltapile.topology.plan import Plan
from voltapile.workers.protocol import Sampling

CONTEXT = 256
START, END = 256, 257  # ids 0 to 255 are the bytes
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if shout is defined %}{{ shout }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ScriptedStream(Stream):
    """Plays a list of chunks, pauses (seconds), and exceptions, once somebody reads."""

    cached_tokens = 1

    def __init__(self, script: list[Any]) -> None:
        super().__init__(Request(0, [1], Sampling()), lambda request: self.cancelled.set())
        self.script = script
        self.cancelled = asyncio.Event()
        self.failure: Exception | None = None
        self.playing: asyncio.Task[None] | None = None

    async def __anext__(self) -> Chunk:
        self.play()
        return await super().__anext__()

    def listen(self, tell: Callable[[], None]) -> None:
        super().listen(tell)
        self.play()

    def take(self) -> Chunk | None:
        if self.failure is not None:
            raise self.failure
        return super().take()

    def play(self) -> None:
        self.playing = self.playing or asyncio.ensure_future(self._play())

    async def _play(self) -> None:
        while self.script and not self.cancelled.is_set():
            step = self.script.pop(0)
            if isinstance(step, Chunk):
                self.put(copy.deepcopy(step))  # a stream merges what comes into what nobody took
                await asyncio.sleep(0)  # the reader takes each by itself
            elif isinstance(step, Exception):
                self.failure = step
                return self._tell()
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.cancelled.wait(), step)
        return self.put(Chunk(finish="cancelled"))


class ScriptedEngine:
    """Every submit plays `script` from its beginning."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.say("Hello")
        self.refusal: Exception | None = None
        self.health = Health("ok")
        self.memory = {1: {"kv": (200, 199)}}
        self.status_ports: list[int] = []
        self.prompts: list[list[int]] = []
        self.sampling: list[Sampling] = []
        self.wants: list[Any] = []
        self.clients: list[str] = []
        self.salts: list[bytes] = []
        self.streams: list[ScriptedStream] = []

    def say(self, text: str | bytes, finish: str = "stop") -> None:
        """A chunk for each byte, then the end: "stop", "length" or "" (none: it hangs)."""
        data = text.encode() if isinstance(text, str) else text
        self.script = [Chunk([byte]) for byte in data]
        if finish == "stop":
            self.script.append(Chunk([END], finish="stop"))
        elif finish == "length":
            self.script[-1].finish = "length"
        else:
            self.script.append(60.0)

    def submit(
        self,
        prompt: list[int],
        sampling: Sampling,
        want: Any = None,
        client: str = "",
        salt: bytes = b"",
        **bounds: Any,
    ) -> ScriptedStream:
        if self.refusal is not None:
            raise self.refusal
        self.prompts.append(prompt)
        self.sampling.append(sampling)
        self.wants.append(want)
        self.clients.append(client)
        self.salts.append(salt)
        self.streams.append(ScriptedStream(list(self.script)))
        return self.streams[-1]

    def stats(self) -> EngineStats:
        return EngineStats(requests=len(self.prompts), running=2, pages_total=7)


def byte_characters() -> list[str]:
    """How byte-level BPE writes the bytes 0 to 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]


def tokenizer_of(*control: str) -> Tokenizer:
    """The bytes, and from id 256 on these control tokens; the second one ends answers."""
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*byte_characters(), *control],
            "tokenizer.ggml.token_type": [1] * 256 + [3] * len(control),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": END,
        }
    )


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return tokenizer_of("<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Tokenizer]:
    return tokenizer_of


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE)


@pytest.fixture
def plan() -> Plan:
    return Plan(
        model=["tiny.gguf"],
        alias="tiny/model",
        architecture="llama",
        backend="cpu",
        endpoint="",
        context=CONTEXT,
        slots=4,
        batch_tokens=64,
        buckets=[1],
        steps_in_flight=2,
        answer_rank=0,
        ranks=[],
        caches=[],
        tensors={},
    )


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


Serve = Callable[..., Any]


@pytest_asyncio.fixture
async def serve(
    engine: ScriptedEngine, tokenizer: Tokenizer, template: ChatTemplate, plan: Plan
) -> AsyncIterator[Serve]:
    """await serve(**options of make_app) -> a client session of a running server."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**options: Any) -> aiohttp.ClientSession:
            options = {"template": template} | options
            app = make_app(engine, tokenizer, options.pop("template"), plan, **options)
            url = await stack.enter_async_context(listening(app, "127.0.0.1", 0))
            return await stack.enter_async_context(aiohttp.ClientSession(url))

        yield start


@pytest_asyncio.fixture
async def client(serve: Serve) -> aiohttp.ClientSession:
    return await serve()


@pytest.fixture
def post(client: aiohttp.ClientSession) -> Callable[..., Any]:
    """await post(path, body) -> (status, JSON)."""

    async def send(path: str, body: Any) -> tuple[int, Any]:
        payload = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        async with client.post(path, **payload) as response:
            return response.status, await response.json()

    return send


@pytest.fixture
def events(client: aiohttp.ClientSession) -> Callable[..., Any]:
    """await events(path, body) -> the payloads of a stream; "[DONE]" is the last one."""

    async def read(path: str, body: Any) -> list[Any]:
        async with client.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            return parse_events(await response.read())

    return read


@pytest.fixture
def parse() -> Callable[[bytes], list[Any]]:
    return parse_events


def parse_events(data: bytes) -> list[Any]:
    """Strict: every event is one `data:` line and an empty line; comments begin with a colon."""
    assert data.endswith(b"\n\n")
    payloads: list[Any] = []
    for block in data[:-2].split(b"\n\n"):
        assert b"\n" not in block
        if block.startswith(b":"):
            continue
        assert block.startswith(b"data: ")
        text = block[len(b"data: ") :].decode("utf-8")
        payloads.append(text if text == "[DONE]" else json.loads(text))
    return payloads
