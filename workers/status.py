"""What a worker tells of itself: /health and /metrics on a port of its own, on this machine alone.

The loop writes numbers, a thread answers with them, so that an answer comes during a long step too;
whether the loop goes round is told by the Board, where the loop itself writes. The thread also
looks now and then whom the rank waits for: short waits do not show. Knows neither model nor
gateway.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from voltapile.shm.board import Board
from voltapile.topology.plan import Plan
from voltapile.workers.routing import Routing

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05  # between two looks at whom the rank waits for
CLIENT_SECONDS = 0.5  # that a client may take to ask
SILENT_SECONDS = 60.0  # without a sign of life after which the rank is not healthy
MOST_BYTES = 4096  # of a question
BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
Memory = Mapping[str, tuple[int, int]]


class Status:
    """Numbers of one rank. The loop calls `step_done` and sets `memory`."""

    def __init__(self, board: Board, plan: Plan, rank: int) -> None:
        self._board, self._plan, self._mine = board, plan, plan.ranks[rank]
        self.rank = rank
        self.shared_bytes = 0  # of tensors that all ranks read
        self.memory: Memory = {}  # planned and allocated bytes by purpose
        self.routing = Routing({})  # of experts
        self.steps = 0
        self.seconds = self.last_seconds = 0.0
        self.buckets = [0] * (len(BUCKETS) + 1)
        self.waited: Counter[int] = Counter()  # looks at which it waited, by rank

    def step_done(self, seconds: float) -> None:
        self.steps += 1
        self.seconds += seconds
        self.last_seconds = seconds
        self.buckets[bisect_left(BUCKETS, seconds)] += 1

    def look(self) -> None:
        """Count whom the rank waits for in a step."""
        health = self._board.health(self.rank)
        if health.waits_for >= 0 and health.step >= 0:
            self.waited[health.waits_for] += 1

    def report(self) -> dict[str, Any]:
        """Everything, as /health shows it."""
        health, ended = self._board.health(self.rank), self._board.aborted
        status = "ok" if health.state == "ready" else health.state
        reason = ""
        if ended is not None:
            status, reason = "ended", ended
        elif health.age > SILENT_SECONDS:
            status, reason = "silent", f"no sign of life for {health.age:.0f} s"
        return {
            "status": status,
            "reason": reason,
            "rank": self.rank,
            "plan": self._plan.id,
            "device": self._mine.device,
            "stage": health.stage,
            "fraction": health.fraction,
            "heartbeat_age": round(health.age, 3),
            "step": health.step,
            "waits_for": health.waits_for,
            "steps": self.steps,
            "step_seconds": self.seconds,
            "last_step_seconds": self.last_seconds,
            "memory": self._memory(),
            "waited_seconds": {str(k): n * LOOK_SECONDS for k, n in self.waited.items()},
        }

    def _memory(self) -> dict[str, dict[str, dict[str, int]]]:
        """Planned and used bytes by tier and purpose. What the process has of the host's memory
        counts as a whole."""
        in_vram = self._mine.device.startswith("cuda")
        tier = "vram" if in_vram else "host"
        found: dict[str, dict[str, dict[str, int]]] = {
            tier: {
                purpose: {"planned": planned, "used": self.memory.get(purpose, (0, 0))[1]}
                for purpose, planned in self._mine.memory.items()
            }
        }
        for purpose, (planned, used) in self.memory.items():
            found[tier][purpose] = {"planned": planned, "used": used}
        beside = sum(self._mine.host.values() if in_vram else self._mine.memory.values())
        host = found.setdefault("host", {})
        host["process"] = {"planned": beside, "used": resident_bytes()}
        shared = sum(self._plan.shared.values()) if in_vram else 0
        if shared:  # once for all ranks, and a part of what each process has
            host["shared"] = {"planned": shared, "used": self.shared_bytes}
        return found

    def metrics(self) -> str:
        """For Prometheus."""
        rank = f'rank="{self.rank}"'
        told = self.report()
        lines = _family(
            "up", "gauge", "Whether the rank can compute", {rank: told["status"] == "ok"}
        )
        lines += _family("heartbeat_age_seconds", "gauge", "Time since its loop went round",
                         {rank: told["heartbeat_age"]})  # fmt: skip
        lines += self._histogram(rank)
        waited = {f'{rank},for="{k}"': v for k, v in told["waited_seconds"].items()}
        text = "Time in steps in which it was seen to wait for another rank"
        lines += _family("waited_seconds_total", "counter", text, waited)
        memory = {
            f'{rank},tier="{tier}",purpose="{purpose}",kind="{kind}"': nbytes
            for tier, purposes in told["memory"].items()
            for purpose, kinds in purposes.items()
            for kind, nbytes in kinds.items()
        }
        lines += _family("memory_bytes", "gauge", "Memory as planned and as used", memory)
        lines += self._experts(rank)
        return "\n".join(lines) + "\n"

    def _experts(self, rank: str) -> list[str]:
        if not (choices := self.routing.choices()):
            return []
        values = {f'{rank},phase="{phase}"': count for phase, count in choices.items()}
        text = "Choices of experts, by all tokens in all layers"
        lines = _family("expert_choices_total", "counter", text, values)
        shares = {
            f'{rank},layer="{layer}",phase="{phase}"': round(share, 4)
            for (layer, phase), share in self.routing.shares().items()
        }
        text = "Part of a layer's choices that the busiest eighth of its experts had"
        return [*lines, *_family("expert_busiest_share", "gauge", text, shares)]

    def _histogram(self, rank: str) -> list[str]:
        name = "voltapile_worker_step_seconds"
        lines = [f"# HELP {name} Time of a step, by the worker's clock", f"# TYPE {name} histogram"]
        total = 0
        for most, count in zip((*map(str, BUCKETS), "+Inf"), list(self.buckets), strict=True):
            total += count
            lines.append(f'{name}_bucket{{{rank},le="{most}"}} {total}')
        return [*lines, f"{name}_sum{{{rank}}} {self.seconds}", f"{name}_count{{{rank}}} {total}"]


def _family(name: str, kind: str, text: str, values: Mapping[str, float]) -> list[str]:
    name = f"voltapile_worker_{name}"
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    return [*lines, *(f"{name}{{{labels}}} {float(value)}" for labels, value in values.items())]


def resident_bytes() -> int:
    """Of this process, what it shares included."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


class StatusPort:
    """Answers on 127.0.0.1 while it is open. port: 0 for a free one. Raises OSError."""

    def __init__(self, status: Status, port: int = 0) -> None:
        self._status = status
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("127.0.0.1", port))
        except OSError as error:
            self._socket.close()
            raise OSError(
                f"--status-port {port}: 127.0.0.1 has no such port free: {error.strerror}"
            ) from None
        self._socket.listen(8)
        self.port = int(self._socket.getsockname()[1])
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def __enter__(self) -> StatusPort:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        self._socket.settimeout(LOOK_SECONDS)
        look_at = time.monotonic()
        while self._is_open:
            try:
                client, _ = self._socket.accept()
            except TimeoutError:
                pass
            except OSError as error:
                log.warning("the status port fails: %s", error)
                return
            else:
                with client:
                    self._serve(client)
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + LOOK_SECONDS
                self._status.look()

    def _serve(self, client: socket.socket) -> None:
        """One question, one answer."""
        try:
            client.settimeout(CLIENT_SECONDS)
            question, until = b"", time.monotonic() + CLIENT_SECONDS
            while b"\r\n\r\n" not in question and len(question) < MOST_BYTES:
                if time.monotonic() > until:  # a byte now and then
                    return
                part = client.recv(MOST_BYTES)
                if not part:
                    return
                question += part
            client.sendall(answer(self._status, question))
        except OSError:
            pass  # who asked has gone


def answer(status: Status, question: bytes) -> bytes:
    """The bytes of HTTP for a GET of /health or /metrics."""
    words = question.split(b"\r\n", 1)[0].split()
    method, path = (words[0], words[1].partition(b"?")[0]) if len(words) == 3 else (b"", b"")
    if method not in (b"GET", b"HEAD"):
        return _http("405 Method Not Allowed", "text/plain", "ask with GET\n")
    if path == b"/health":
        told = status.report()
        line = "200 OK" if told["status"] == "ok" else "503 Service Unavailable"
        return _http(line, "application/json", json.dumps(told) + "\n")
    if path == b"/metrics":
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return _http("200 OK", kind, status.metrics())
    return _http("404 Not Found", "text/plain", "there are /health and /metrics\n")


def _http(line: str, kind: str, body: str) -> bytes:
    data = body.encode()
    head = f"HTTP/1.1 {line}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + data
