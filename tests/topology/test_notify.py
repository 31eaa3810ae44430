"""What systemd hears, over the datagram socket that it would open."""

from __future__ import annotations

import contextlib
import secrets
import socket
from pathlib import Path

import pytest
from voltapile.topology import notify
from voltapile.topology.notify import Notifier


@pytest.mark.parametrize("is_abstract", [False, True])
def test_states_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_abstract: bool
) -> None:
    monkeypatch.setattr(notify, "BEAT_SECONDS", 1000.0)
    name = f"@voltapile-{secrets.token_hex(8)}" if is_abstract else str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(name.replace("@", "\0", 1))
        server.settimeout(5)
        notifier = Notifier(name)
        notifier.status("loading")
        notifier.status("loading")
        notifier.beat()
        notifier.beat()  # too soon to be told again
        notifier.ready("all is well")
        notifier.stopping()
        notifier.close()
        notifier.beat()
        heard = [server.recv(100).decode() for _ in range(4)]
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.recv(100)
    assert heard == ["STATUS=loading", "WATCHDOG=1", "READY=1\nSTATUS=all is well", "STOPPING=1"]


def test_ready_is_not_lost_in_a_full_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "BEAT_SECONDS", 0.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "n"))
        server.setblocking(False)
        notifier = Notifier(str(tmp_path / "n"))
        for _ in range(5000):  # more than a queue holds
            notifier.beat()
        notifier.ready("now")
        heard = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                heard.add(server.recv(100))
        assert heard == {b"WATCHDOG=1"}
        notifier.beat()
        assert server.recv(100) == b"READY=1\nSTATUS=now"
        notifier.close()


def test_nobody_listens(tmp_path: Path) -> None:
    for address in ("", str(tmp_path / "missing")):
        notifier = Notifier(address)
        notifier.ready()
        notifier.beat()
        notifier.close()
