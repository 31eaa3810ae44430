"""Metrics of several workers become one text; who does not answer is left out."""

from __future__ import annotations

import asyncio
import socket

from prometheus_client.parser import text_string_to_metric_families
from voltapile.gateway.gather import gather, merged

ONE = '# HELP a_total what\n# TYPE a_total counter\na_total{rank="0"} 1.0\n'
TWO = (
    '# HELP a_total what\n# TYPE a_total counter\na_total{rank="1"} 2.0\n'
    '# HELP b other\n# TYPE b gauge\nb{rank="1"} 3.0\n'
)


def test_families_come_once() -> None:
    text = merged([ONE, TWO]).decode()
    assert text.count("# TYPE a_total counter") == text.count("# HELP a_total what") == 1
    found = {
        (sample.name, sample.labels["rank"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found == {("a_total", "0"): 1.0, ("a_total", "1"): 2.0, ("b", "1"): 3.0}
    assert merged([]) == b""


async def test_silent_and_missing_workers_are_left_out() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + ONE.encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    with socket.socket() as silent, socket.socket() as closed:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        closed.bind(("127.0.0.1", 0))
        sockets = server.sockets[0], silent, closed
        body = await gather([each.getsockname()[1] for each in sockets])
    server.close()
    await server.wait_closed()
    assert body == merged([ONE])
