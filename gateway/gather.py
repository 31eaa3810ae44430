"""Asks the workers of this machine for their own /metrics, and makes one text of all of them.

Each listens on 127.0.0.1 at a port that it has told; one that does not answer soon is left out: the
gateway's own numbers say why. Knows nothing of what the metrics mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

SECONDS = 0.5  # that a worker may take
MOST_BYTES = 1 << 20
QUESTION = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"


async def gather(ports: Iterable[int]) -> bytes:
    """For Prometheus; b"" where nobody answers."""
    texts = await asyncio.gather(*map(_ask, ports))
    return merged([text for text in texts if text])


async def _ask(port: int) -> str:
    try:
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(QUESTION)
                data = b""
                while len(data) < MOST_BYTES and (part := await reader.read(MOST_BYTES)):
                    data += part
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return ""
    head, _, body = data.partition(b"\r\n\r\n")
    is_ok = head.split(b"\r\n")[0].split()[1:2] == [b"200"]
    return body.decode(errors="replace") if is_ok else ""


def merged(texts: Sequence[str]) -> bytes:
    """Families of metrics, each once with everybody's samples: the format allows no second one."""
    families: dict[str, list[str]] = {}
    for text in texts:
        lines = families.setdefault("", [])
        for line in text.splitlines():
            if line.startswith("# HELP "):
                head = line.split(" ", 3)[2]
                is_new = head not in families
                lines = families.setdefault(head, [])
                if is_new:
                    lines.append(line)
            elif line not in lines or not line.startswith("#"):
                lines.append(line)
    return "".join(f"{line}\n" for lines in families.values() for line in lines).encode()
