"""A light client for the benches here: one streamed completion over a plain socket, timed.

Raw HTTP/1.1, because a full client costs more CPU than the gateway that is measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Timed:
    """Seconds on time.perf_counter's clock. arrivals: (when, events in that read)."""

    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first_token_seconds(self) -> float:
        return self.first - self.sent

    @property
    def decode_tok_s(self) -> float:
        return (self.tokens - 1) / (self.last - self.first)


async def stream_completion(url: str, prompt: list[int], tokens: int, **fields: object) -> Timed:
    """Generate exactly `tokens` after `prompt`. Raises RuntimeError on anything but a stream."""
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        data = json.dumps(body | fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        timed = Timed(sent=time.perf_counter())
        writer.write(head.encode() + data)
        return await _read(reader, timed)
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, timed: Timed) -> Timed:
    seen = b""
    while more := await reader.read(1 << 16):
        now = time.perf_counter()
        events = more.count(b'"text"')
        if events:
            timed.first = timed.first or now
            timed.last = now
            timed.arrivals.append((now, events))
        seen += more
    if b" 200 " not in seen[:20] or b"data: [DONE]" not in seen:
        raise RuntimeError(f"no whole stream came: {seen[:500]!r}")
    last = seen[: seen.rindex(b"data: [DONE]")].rsplit(b"data: ", 1)[1].splitlines()[0]
    timed.tokens = json.loads(last)["usage"]["completion_tokens"]
    return timed


async def together(
    url: str, prompts: list[list[int]], tokens: int, **fields: object
) -> list[Timed]:
    """All at once."""
    return await asyncio.gather(
        *(stream_completion(url, prompt, tokens, **fields) for prompt in prompts)
    )


def joint_tok_s(streams: list[Timed]) -> float:
    """Tokens a second of all streams, from the last one's first token to the first one's last.

    Several tokens may share an event, so a stream's tokens are spread evenly over its events.
    """
    begin, end = max(s.first for s in streams), min(s.last for s in streams)
    if end <= begin:
        raise RuntimeError("the streams never ran all together: ask for more tokens")
    tokens = 0.0
    for stream in streams:
        inside = sum(n for when, n in stream.arrivals if begin < when <= end)
        tokens += stream.tokens * inside / sum(n for _, n in stream.arrivals)
    return tokens / (end - begin)
